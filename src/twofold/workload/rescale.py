"""Functions that scale the arrival times or lengths of requests, or select some of the requests.

A prefix block has 512 tokens. A shortened prompt keeps the ids of its complete blocks.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from msgspec.structs import replace

from twofold.errors import require
from twofold.request import Request
from twofold.workload.blocks import BLOCK_TOKENS
from twofold.workload.distributions import require_positive


def scale_rate(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """Multiply the arrival rate by `factor`."""
    require_positive("rate scale", factor)
    return (replace(request, arrival_s=request.arrival_s / factor) for request in requests)


def mean_rate(requests: Iterable[Request]) -> float | None:
    """Return the mean arrival rate per second; None for fewer than two requests, infinity if all arrive at once."""
    first = last = None
    gaps = -1
    for request in requests:
        first = request.arrival_s if first is None else first
        last = request.arrival_s
        gaps += 1
    if first is None or last is None or gaps < 1:
        return None
    return gaps / (last - first) if last > first else math.inf


def to_rate(reopen: Callable[[], Iterator[Request]], rate: float) -> Iterator[Request]:
    """Return the requests with arrival times scaled to a mean of `rate` requests per second.

    The requests are read twice, so the function `reopen` must return a new iterator at every call. Raises
    ConfigurationError if all requests arrive at the same time.
    """
    require_positive("rate", rate)
    current = mean_rate(reopen())
    if current is None:
        return reopen()
    require(
        math.isfinite(current),
        "all requests arrive at the same time, so they cannot be scaled to a rate: generate new arrivals",
    )
    return scale_rate(reopen(), rate / current)


def retime(requests: Iterable[Request], times_s: Iterable[float]) -> Iterator[Request]:
    """Replace the arrival times by `times_s`, in order. Later turns of a session arrive no earlier than the request
    before them, so that think times determine their pace.
    """
    begun, latest_s = set[str](), 0.0
    for request, time_s in zip(requests, times_s, strict=False):
        if request.session not in begun:
            latest_s = time_s
        if request.session:
            begun.add(request.session)
        yield replace(request, arrival_s=latest_s)


def window(requests: Iterable[Request], start_s: float, duration_s: float | None = None) -> Iterator[Request]:
    """Select the requests that arrive within `duration_s` after `start_s`. `start_s` becomes time 0."""
    require(start_s >= 0 and math.isfinite(start_s), f"the start must be at least 0 s, not {start_s:g} s")
    if duration_s is not None:
        require_positive("duration", duration_s)
    return _window(requests, start_s, math.inf if duration_s is None else start_s + duration_s)


def _window(requests: Iterable[Request], start_s: float, end_s: float) -> Iterator[Request]:
    for request in requests:
        if request.arrival_s >= end_s:
            return
        if request.arrival_s >= start_s:
            yield replace(request, arrival_s=request.arrival_s - start_s) if start_s else request


def take(requests: Iterable[Request], count: int | None) -> Iterator[Request]:
    """Select the first `count` requests, or all if `count` is None."""
    require(count is None or count >= 1, f"the number of requests must be at least 1, not {count}")
    return islice(requests, count)


def scale_lengths(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """Multiply every prompt and output length by `factor`, rounded to whole tokens and at least 1."""
    require_positive("length scale", factor)
    return (
        resize(request, max(1, round(request.prompt_tokens * factor)), max(1, round(request.output_tokens * factor)))
        for request in requests
    )


def fit_to_context(requests: Iterable[Request], max_model_len: int) -> Iterator[Request]:
    """Shorten requests of over `max_model_len` tokens, prompt and output alike. Sessions end before such a turn."""
    require(max_model_len >= 2, f"the context must be at least 2 tokens, not {max_model_len}")
    return (
        _clipped(request, max_model_len)
        for request in requests
        if not request.session or request.prompt_tokens + request.output_tokens <= max_model_len
    )


def fit_lengths(requests: Iterable[Request], length_scale: float, max_model_len: int | None) -> Iterator[Request]:
    """Multiply all lengths by `length_scale`, then shorten requests of more than `max_model_len` tokens."""
    scaled = iter(requests) if length_scale == 1 else scale_lengths(requests, length_scale)
    return scaled if max_model_len is None else fit_to_context(scaled, max_model_len)


def _clipped(request: Request, limit: int) -> Request:
    whole = request.prompt_tokens + request.output_tokens
    if whole <= limit:
        return request
    # Rounding down keeps the sum within the limit and leaves room for the minimum of 1.
    prompt, output = (max(1, part * limit // whole) for part in (request.prompt_tokens, request.output_tokens))
    return resize(request, prompt, output)


def resize(request: Request, prompt_tokens: int, output_tokens: int) -> Request:
    """Return the request with new lengths."""
    # An id identifies all tokens up to the end of its block, so only complete blocks keep theirs.
    blocks = request.prefix_blocks
    if prompt_tokens != request.prompt_tokens:
        blocks = blocks[: min(prompt_tokens, request.prompt_tokens) // BLOCK_TOKENS]
    shared = min(round(request.shared_tokens * prompt_tokens / request.prompt_tokens), prompt_tokens)
    return replace(
        request, prompt_tokens=prompt_tokens, output_tokens=output_tokens, prefix_blocks=blocks, shared_tokens=shared
    )
