"""Trace format of the Azure LLM inference traces: csv with TIMESTAMP, ContextTokens and GeneratedTokens.

Timestamps are read relative to the first request, and written relative to 1970-01-01. Source: Azure Public Dataset.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from twofold.errors import ConfigurationError
from twofold.request import Request
from twofold.workload.format import TraceFormat, output_length, prompt_length
from twofold.workload.rows import Lines, csv_rows, parse_int

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
TICKS_PER_S = 10**7


def read(lines: Lines) -> Iterator[Request]:
    first: int | None = None
    for index, (timestamp, context, generated) in enumerate(csv_rows(lines, COLUMNS)):
        moment = _nanoseconds(lines, timestamp)
        first = moment if first is None else first
        yield Request(
            id=str(index),
            arrival_s=(moment - first) / 1e9,
            prompt_tokens=prompt_length(lines, COLUMNS[1], parse_int(lines, COLUMNS[1], context)),
            output_tokens=output_length(lines, COLUMNS[2], parse_int(lines, COLUMNS[2], generated)),
        )


def encode(_index: int, request: Request) -> str:
    whole_s, ticks = divmod(round(request.arrival_s * TICKS_PER_S), TICKS_PER_S)
    try:
        moment = _EPOCH + timedelta(seconds=whole_s)
    except OverflowError as error:
        raise ConfigurationError(
            f"request {request.id} arrives at {request.arrival_s:g} s, too late for an azure date"
        ) from error
    return f"{moment:%Y-%m-%d %H:%M:%S}.{ticks:07d},{request.prompt_tokens},{request.output_tokens}"


def _nanoseconds(lines: Lines, text: str) -> int:
    match = _TIME.fullmatch(text)  # integers, because a float would lose precision
    if match is None:
        raise lines.error(f"TIMESTAMP is {text!r}, which is not a time such as 2023-11-16 18:17:03.9799600")
    try:
        # Times without an offset are treated as UTC; only differences matter.
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError as error:
        raise lines.error(f"TIMESTAMP is {text!r}, an invalid time: {error}") from error
    return (moment - _EPOCH) // _SECOND * 10**9 + int((match[2] or "").ljust(9, "0"))


AZURE = TraceFormat(name="azure", keys=COLUMNS, suffix=".csv", read=read, encode=encode, header=",".join(COLUMNS))
