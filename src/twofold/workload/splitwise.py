"""Trace format of SplitwiseSim: csv with arrival_timestamp in seconds, prompt_size, token_size and other columns.

Every row is one request. Rows with a `batch_size` other than 1 are errors.
"""

import csv
from collections.abc import Iterator
from io import StringIO

from twofold.errors import ConfigurationError
from twofold.request import Request
from twofold.workload.format import TraceFormat, output_length, prompt_length
from twofold.workload.rows import Lines, csv_rows, parse_int, parse_seconds

HEADER = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
COLUMNS = ("request_id", "arrival_timestamp", "batch_size", "prompt_size", "token_size")


def read(lines: Lines) -> Iterator[Request]:
    for name, arrival, batch, prompt, output in csv_rows(lines, COLUMNS):
        if parse_int(lines, "batch_size", batch) != 1:
            raise lines.error(f"batch_size is {batch}, and only rows of one request are supported")
        yield Request(
            id=name,
            arrival_s=parse_seconds(lines, "arrival_timestamp", arrival),
            prompt_tokens=prompt_length(lines, "prompt_size", parse_int(lines, "prompt_size", prompt)),
            output_tokens=output_length(lines, "token_size", parse_int(lines, "token_size", output)),
        )


def encode(_index: int, request: Request) -> str:
    if not request.id.isprintable() or request.id != request.id.strip():
        raise ConfigurationError(f"request id {request.id!r} cannot be written to csv; write twofold instead")
    # Like SplitwiseSim's trace generator: request_type 2 (LLM inference), application_id 0.
    row = (request.id, 2, 0, repr(request.arrival_s), 1, request.prompt_tokens, request.output_tokens)
    text = StringIO()
    csv.writer(text, lineterminator="").writerow(row)
    return text.getvalue()


SPLITWISE = TraceFormat(
    name="splitwise", keys=COLUMNS, suffix=".csv", read=read, encode=encode, header=HEADER, keeps_ids=True
)
