"""Type of a trace format, and the rules that all formats share for reading and writing:

- One line is one request, in order of arrival; blank lines are skipped.
- A prompt has at least one token; shorter lengths are errors.
- An output of length 0 is read as an output of length 1, because prefill always produces a first token.
- Missing or non-finite numbers and fractional lengths are errors. The error message names the line.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twofold.request import Request
from twofold.workload.rows import Lines

MAX_TOKENS = 2**31 - 1  # larger numbers in a trace are errors


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """A trace format: how to detect, read and write it.

    `keys` are its required csv columns or JSON keys. `encode` formats a request as one line, or is None if the
    format is only read. `resolution_s` is the resolution of written arrival times (0: exact).
    """

    name: str
    keys: tuple[str, ...]
    suffix: str
    read: Callable[[Lines], Iterator[Request]]
    encode: Callable[[int, Request], str] | None
    header: str | None = None
    keeps_ids: bool = False
    keeps_prefix_blocks: bool = False
    keeps_sessions: bool = False
    resolution_s: float = 0.0


def prompt_length(lines: Lines, name: str, tokens: int) -> int:
    """Return `tokens` if it is a valid prompt length. Raises WorkloadError otherwise."""
    if tokens < 1:
        raise lines.error(f"{name} is {tokens}, and a prompt has at least one token")
    return _bounded(lines, name, tokens)


def output_length(lines: Lines, name: str, tokens: int) -> int:
    """Return `tokens` if it is a valid output length, or 1 if it is 0. Raises WorkloadError otherwise."""
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
    """Return the prefix block ids of a request as integers."""
    # Hashes are truncated to their first eight bytes.
    return tuple(block if isinstance(block, int) else int.from_bytes(block[:8]) for block in request.prefix_blocks)
