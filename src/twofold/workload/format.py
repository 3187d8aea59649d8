"""Description of a trace format, and rules for reading and writing all formats:

- One line is one request, in order of arrival; blank lines are skipped.
- A prompt has at least one token; shorter lengths are errors.
- An output of length 0 is read as 1, because such requests were cut off after prefill, which always produces a first
  token. `ReadNotes.zero_outputs` counts them.
- Missing or non-finite numbers and fractional lengths are errors that name the line.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twofold.request import Request
from twofold.workload.rows import Lines

MAX_TOKENS = 2**31 - 1  # larger numbers in a trace are errors


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """A trace format: how to detect, read and write it, and the request fields that it supports.

    `keys` are the required columns or JSON keys, also used for detection. `read` yields the requests of a file.
    `encode` formats a request and its index as one line. `header` is the first line of a file, if any. `resolution_s`
    is the step to which written arrival times are rounded; 0 if they are exact or the step is below float precision.
    """

    name: str
    keys: tuple[str, ...]
    suffix: str
    read: Callable[[Lines], Iterator[Request]]
    encode: Callable[[int, Request], str]
    header: str | None = None
    keeps_ids: bool = False
    keeps_prefix_blocks: bool = False
    resolution_s: float = 0.0


def prompt_length(lines: Lines, name: str, tokens: int) -> int:
    """Validate and return a prompt length, from the field `name` of the current line."""
    if tokens < 1:
        raise lines.error(f"{name} is {tokens}, and a prompt has at least one token")
    return _bounded(lines, name, tokens)


def output_length(lines: Lines, name: str, tokens: int) -> int:
    """Validate and return an output length, from the field `name` of the current line. A length of 0 becomes 1."""
    if tokens < 0:
        raise lines.error(f"{name} is {tokens}, and an output has no negative length")
    if tokens == 0:
        lines.notes.zero_outputs += 1
        return 1
    return _bounded(lines, name, tokens)


def _bounded(lines: Lines, name: str, tokens: int) -> int:
    if tokens > MAX_TOKENS:
        raise lines.error(f"{name} is {tokens}, more than a trace can hold ({MAX_TOKENS:,})")
    return tokens


def block_numbers(request: Request) -> tuple[int, ...]:
    """Return the prefix blocks of a request as integers. Hashes are truncated to their first eight bytes."""
    return tuple(block if isinstance(block, int) else int.from_bytes(block[:8]) for block in request.prefix_blocks)
