"""Twofold's lossless trace format: jsonl with one `Request` per line."""

import math
from collections.abc import Iterator

import msgspec

from twofold.request import Request
from twofold.workload.format import TraceFormat, block_numbers, output_length, prompt_length
from twofold.workload.rows import Lines, json_rows


class TwofoldRow(msgspec.Struct, omit_defaults=True):
    """One line of a trace: the fields of `Request`."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()


def read(lines: Lines) -> Iterator[Request]:
    for line in json_rows(lines, TwofoldRow):
        if not math.isfinite(line.arrival_s) or line.arrival_s < 0:
            raise lines.error(f"arrival_s is {line.arrival_s:g}, which is not a time in seconds from 0 on")
        yield Request(
            id=line.id,
            arrival_s=line.arrival_s,
            prompt_tokens=prompt_length(lines, "prompt_tokens", line.prompt_tokens),
            output_tokens=output_length(lines, "output_tokens", line.output_tokens),
            prefix_blocks=line.prefix_blocks,
        )


def encode(_index: int, request: Request) -> str:
    line = TwofoldRow(
        request.id, request.arrival_s, request.prompt_tokens, request.output_tokens, block_numbers(request)
    )
    return msgspec.json.encode(line).decode()


TWOFOLD = TraceFormat(
    name="twofold",
    keys=("id", "arrival_s", "prompt_tokens", "output_tokens"),
    suffix=".jsonl",
    read=read,
    encode=encode,
    keeps_ids=True,
    keeps_prefix_blocks=True,
)
