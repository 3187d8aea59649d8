"""Compare the parser of tool calls with vLLM's parsers, on random calls in the format of each family of models.

    python bench/answers/vllm_parsers.py     # with the Python of an environment that has vLLM

Arguments are strings with code, JSON and XML in them, numbers, booleans, objects and lists. The gateway's parser gets
an answer in pieces of random lengths, vLLM's the whole text. Prints for each family how many answers each of them has
wrong, and exits with 1 if the gateway has one wrong.
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Iterator

from gateway_parser import Calls, parsed
from rich.console import Console
from rich.table import Table
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from twofold.serving.gateway.tools.families import FAMILIES, Json

VLLM_NAMES = {
    "hermes": "hermes",
    "llama3": "llama3_json",
    "mistral-args": "mistral",
    "deepseek": "deepseek_v3",
    "deepseek-v31": "deepseek_v31",
    "glm": "glm45",
    "qwen3-coder": "qwen3_coder",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
}
# Before and after all calls, a call, and a parameter.
XML = {
    "glm": ("", "", "<tool_call>{}\n{}</tool_call>\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "qwen3-coder": (
        "",
        "",
        "<tool_call>\n<function={}>\n{}</function>\n</tool_call>\n",
        "<parameter={}>\n{}\n</parameter>\n",
    ),
    "minimax": (
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
        '<invoke name="{}">\n{}</invoke>\n',
        '<parameter name="{}">{}</parameter>\n',
    ),
}
KINDS = {"city": "string", "days": "integer", "share": "number", "now": "boolean", "place": "object", "stops": "array"}
NAMES = ("get_weather", "f", "get-time")
PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in KINDS.items()}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
STRINGS = (
    "Rome",
    "10115",
    '{"a": 1}',
    "a < b > c",
    "} [z]",
    "};",
    "a\nb",
    "é漢字🙂",
    "'x'",
    "true",
    " a ",
    '"q"',
    "\\n",
)


class Tokens:
    """A tokenizer as far as vLLM's parsers use one: every marker is a token."""

    def get_vocab(self) -> "Markers":
        return Markers()

    def encode(self, text: str, **_options: object) -> list[int]:
        return [len(text)]


class Markers(dict[str, int]):
    """A vocabulary with every marker."""

    def __contains__(self, marker: object) -> bool:
        return True

    def get(self, marker: str, _default: object = None) -> int:
        return 1 + len(marker)


def random_calls(draw: random.Random) -> list[tuple[str, Json]]:
    """Return one to three calls."""
    calls = []
    for _ in range(draw.randint(1, 3)):
        text = "".join(draw.choices(STRINGS, k=draw.randint(1, 2)))
        whole: Json = {"city": text, "days": draw.randint(-5, 99), "share": draw.choice((0.5, -1.25))}
        whole |= {"now": draw.random() < 0.5, "place": {"at": [1, {"x": "}"}]}, "stops": ["a", "b;"]}
        calls.append((draw.choice(NAMES), {key: value for key, value in whole.items() if draw.random() < 0.6}))
    return calls


def written(family: str, calls: list[tuple[str, Json]]) -> str:
    """Return calls as a model of the family writes them."""
    if family in XML:
        before, after, call, parameter = XML[family]
        return before + "".join(call.format(name, "".join(_pairs(parameter, given))) for name, given in calls) + after
    form = FAMILIES[family].calls
    each = []
    for number, (name, given) in enumerate(calls):
        head = form.name + (json.dumps(name) if form.quotes else name) + form.arguments.replace(":0", f":{number}")
        each.append(head + json.dumps(given, ensure_ascii=False) + form.end)
    return form.before + form.between.join(each) + form.after


def _pairs(parameter: str, given: Json) -> Iterator[str]:
    for key, value in given.items():
        yield parameter.format(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def of_vllm(family: str, answer: str) -> Calls:
    """Return the calls that vLLM's parser finds."""
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS)
    parser = ToolParserManager.get_tool_parser(VLLM_NAMES[family])(Tokens(), request.tools)
    found = parser.extract_tool_calls(answer, request).tool_calls
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=300, help="answers of each family")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    draw = random.Random(given.seed)
    table = Table("family", "answers", "the gateway wrong", "vLLM wrong")
    failed = False
    for family in VLLM_NAMES:
        wrong, wrong_in_vllm = 0, 0
        for _ in range(given.answers):
            calls = random_calls(draw)
            answer = written(family, calls)
            wrong += parsed(family, TOOLS, answer, draw)[2] != calls
            wrong_in_vllm += of_vllm(family, answer) != calls
        table.add_row(family, str(given.answers), str(wrong), str(wrong_in_vllm))
        failed = failed or wrong > 0
    Console().print(table)
    sys.exit(failed)


if __name__ == "__main__":
    main()
