"""The gateway's parser of answers, fed with pieces of random lengths, for streams and for whole answers."""

import json
import random
from collections.abc import Iterator, Sequence

from twofold.serving.gateway.tools.families import FAMILIES, Json
from twofold.serving.gateway.tools.message_parser import MessageParser, together

Calls = list[tuple[str, object]]  # names and arguments


def parsed(family: str, tools: Sequence[Json], answer: str, draw: random.Random) -> tuple[str, str, Calls]:
    """Return content, reasoning and calls of an answer in the format of a family."""
    template = FAMILIES[family].template
    parser = MessageParser(template, template["start_anchor"], tools, in_parts=draw.choice((True, False)))
    found = together([*map(parser.feed, _pieces(answer, draw)), parser.finish()])
    return found.content, found.reasoning, [(call.name, json.loads(call.arguments)) for call in found.calls]


def _pieces(text: str, draw: random.Random) -> Iterator[str]:
    while text:
        size = draw.choice((1, 2, 3, 5, 9, 1000))
        yield text[:size]
        text = text[size:]
