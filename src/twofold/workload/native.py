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
    session: str = ""
    think_s: float = 0.0
    shared_tokens: int = 0


def read(lines: Lines) -> Iterator[Request]:
    in_sessions: bool | None = None
    for line in json_rows(lines, TwofoldRow):
        if not math.isfinite(line.arrival_s) or line.arrival_s < 0:
            raise lines.error(f"arrival_s is {line.arrival_s:g}, which is not a time in seconds from 0 on")
        in_sessions = bool(line.session) if in_sessions is None else in_sessions
        if bool(line.session) is not in_sessions:
            raise lines.error("either every request of a trace belongs to a session, or none")
        if not 0 <= line.think_s < math.inf:
            raise lines.error(f"think_s is {line.think_s:g}, which is not a time in seconds from 0 on")
        if not 0 <= line.shared_tokens <= line.prompt_tokens:
            raise lines.error(f"shared_tokens is {line.shared_tokens}, which is not a part of the prompt")
        prompt_length(lines, "prompt_tokens", line.prompt_tokens)
        line.output_tokens = output_length(lines, "output_tokens", line.output_tokens)
        yield Request(**msgspec.structs.asdict(line))


def encode(_index: int, request: Request) -> str:
    fields = {name: getattr(request, name) for name in TwofoldRow.__struct_fields__}
    return msgspec.json.encode(TwofoldRow(**fields | {"prefix_blocks": block_numbers(request)})).decode()


TWOFOLD = TraceFormat(
    name="twofold",
    keys=("id", "arrival_s", "prompt_tokens", "output_tokens"),
    suffix=".jsonl",
    read=read,
    encode=encode,
    keeps_ids=True,
    keeps_prefix_blocks=True,
    keeps_sessions=True,
)
