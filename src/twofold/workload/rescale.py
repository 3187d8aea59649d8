"""Changing a workload while it streams: its times, its lengths, and which part of it is taken.

When a prompt changes its length, its prefix blocks of 512 tokens that still lie whole inside it keep their
ids and the others are dropped: an id stands for the very tokens of a full block and everything before it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.request import Request

BLOCK_TOKENS = 512  # of the Mooncake trace's hash_ids; see Request.prefix_blocks


def require_positive(name: str, value: float) -> None:
    """Raise ConfigurationError unless `value` is finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigurationError(f"the {name} is {value:g}, and it takes a positive number")


def scale_rate(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """Arrivals `factor` times as frequent: every time is divided by it."""
    require_positive("rate scale", factor)
    return (replace(request, arrival_s=request.arrival_s / factor) for request in requests)


def mean_rate(requests: Iterable[Request]) -> float | None:
    """Requests per second between the first arrival and the last, which is the inverse of the mean gap.

    None for fewer than two requests; infinite where all arrive at once.
    """
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
    """Times scaled so that `mean_rate` becomes `rate`. `reopen` gives the same requests each time: it is
    called once to measure and once to stream. Raises ConfigurationError where all arrive at once."""
    require_positive("rate", rate)
    current = mean_rate(reopen())
    if current is None:
        return reopen()
    if math.isinf(current):
        raise ConfigurationError("all requests arrive at the same moment, so no scaling gives them a rate")
    return scale_rate(reopen(), rate / current)


def retime(requests: Iterable[Request], times_s: Iterable[float]) -> Iterator[Request]:
    """The same requests at other times, in order; ends with the shorter of the two."""
    return (replace(request, arrival_s=time) for request, time in zip(requests, times_s, strict=False))


def window(requests: Iterable[Request], start_s: float, duration_s: float | None = None) -> Iterator[Request]:
    """The requests that arrive from `start_s` on and before `start_s + duration_s`; `start_s` becomes 0."""
    if not (start_s >= 0 and math.isfinite(start_s)):
        raise ConfigurationError(f"the start is {start_s:g} s, and it takes a time from 0 on")
    if duration_s is not None:
        require_positive("duration", duration_s)
    return _window(requests, start_s, math.inf if duration_s is None else start_s + duration_s)


def _window(requests: Iterable[Request], start_s: float, end_s: float) -> Iterator[Request]:
    for request in requests:
        if request.arrival_s >= end_s:
            return
        if request.arrival_s >= start_s:
            yield replace(request, arrival_s=request.arrival_s - start_s) if start_s else request


def first(requests: Iterable[Request], count: int | None) -> Iterator[Request]:
    """The first `count` requests, or all of them for None."""
    if count is not None and count < 1:
        raise ConfigurationError(f"the number of requests is {count}, and it takes at least 1")
    return islice(requests, count)


def scale_lengths(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """Every prompt and output `factor` times as long, rounded, and at least 1 token."""
    require_positive("length scale", factor)
    return (
        resize(
            request,
            max(1, round(request.prompt_tokens * factor)),
            max(1, round(request.output_tokens * factor)),
        )
        for request in requests
    )


def fit_to_context(requests: Iterable[Request], max_model_len: int) -> Iterator[Request]:
    """Requests of at most `max_model_len` tokens, prompt and output together, each at least 1.

    Those that fit are left alone. The others are clipped: prompt and output shrink in the same proportion, so
    that a request keeps its character. To bring a long trace into a short context, scale its lengths first.
    """
    if max_model_len < 2:
        raise ConfigurationError(f"the context is {max_model_len} tokens, and a request takes at least 2")
    return (_clipped(request, max_model_len) for request in requests)


def fit_lengths(
    requests: Iterable[Request], length_scale: float, max_model_len: int | None
) -> Iterator[Request]:
    """Lengths scaled, then clipped to a context where one is given."""
    scaled = iter(requests) if length_scale == 1 else scale_lengths(requests, length_scale)
    return scaled if max_model_len is None else fit_to_context(scaled, max_model_len)


def _clipped(request: Request, limit: int) -> Request:
    whole = request.prompt_tokens + request.output_tokens
    if whole <= limit:
        return request
    # Rounded down, both together stay within the limit; a part that becomes 0 leaves room for its 1.
    prompt, output = (
        max(1, part * limit // whole) for part in (request.prompt_tokens, request.output_tokens)
    )
    return resize(request, prompt, output)


def resize(request: Request, prompt_tokens: int, output_tokens: int) -> Request:
    """The request with other lengths, and the prefix blocks that are still true of it."""
    blocks = request.prefix_blocks
    if prompt_tokens != request.prompt_tokens:
        blocks = blocks[: min(prompt_tokens, request.prompt_tokens) // BLOCK_TOKENS]
    return replace(request, prompt_tokens=prompt_tokens, output_tokens=output_tokens, prefix_blocks=blocks)
