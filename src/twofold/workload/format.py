"""A trace format: how a file of requests is recognised, read and written, and what it cannot carry.

Rules that hold in every format:

- One line is one request, in order of arrival; blank lines are skipped.
- A prompt has at least one token: a length of 0 is an error, and so is a negative one.
- An output of length 0 is read as 1, because prefill always ends in a first token: such lines are requests
  that were cut off, and the work of their prompt was done all the same. `ReadNotes.zero_outputs` counts them.
- Nothing is guessed: a number that is missing, not finite or not whole is an error with its line.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twofold.request import Request
from twofold.workload.rows import Lines

MAX_TOKENS = 2**31 - 1  # beyond it a number in a trace is a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One format; everything about it is in the file that makes it.

    `keys` are the columns or JSON keys by which it is recognised and without which it cannot be read. `read`
    yields the requests of a file from its first line on; `encode` writes the request at an index as one line
    without its end, below `header` where there is one. `resolution_s` is the step to which arrival times are
    rounded when they are written, 0 where they are kept or no step can be told from the noise of a float.
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
    """Check the prompt length that field `name` of the latest line gives."""
    if tokens < 1:
        raise lines.error(f"{name} is {tokens}, and a prompt has at least one token")
    return _bounded(lines, name, tokens)


def output_length(lines: Lines, name: str, tokens: int) -> int:
    """Check the output length that field `name` of the latest line gives; 0 is read as 1."""
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
    """The prefix blocks of a request as the numbers that traces have; of a hash its first eight bytes make one."""
    return tuple(
        block if isinstance(block, int) else int.from_bytes(block[:8]) for block in request.prefix_blocks
    )
