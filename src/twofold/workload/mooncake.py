"""Trace format of the Mooncake traces (FAST'25): jsonl with timestamp (ms), input_length, output_length and hash_ids.

`hash_ids` is optional and has one id per block of 512 prompt tokens. An id identifies the block and all tokens before
it.
"""

from collections.abc import Iterator

import msgspec

from twofold.request import Request
from twofold.workload.format import TraceFormat, block_numbers, output_length, prompt_length
from twofold.workload.rows import Lines, json_rows

KEYS = ("timestamp", "input_length", "output_length")


class MooncakeRow(msgspec.Struct):
    """One line of a Mooncake trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read(lines: Lines) -> Iterator[Request]:
    first: float | None = None
    for index, line in enumerate(json_rows(lines, MooncakeRow)):
        first = line.timestamp if first is None else first
        yield Request(
            id=str(index),
            arrival_s=(line.timestamp - first) / 1000,
            prompt_tokens=prompt_length(lines, KEYS[1], line.input_length),
            output_tokens=output_length(lines, KEYS[2], line.output_length),
            prefix_blocks=line.hash_ids,
        )


def encode(_index: int, request: Request) -> str:
    line = MooncakeRow(
        timestamp=round(request.arrival_s * 1000),
        input_length=request.prompt_tokens,
        output_length=request.output_tokens,
        hash_ids=block_numbers(request),
    )
    return msgspec.json.encode(line).decode()


MOONCAKE = TraceFormat(
    name="mooncake", keys=KEYS, suffix=".jsonl", read=read, encode=encode, keeps_prefix_blocks=True, resolution_s=1e-3
)
