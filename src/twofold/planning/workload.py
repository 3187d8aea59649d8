"""Workload that a plan simulates at different rates, and mean token counts of its requests."""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, takewhile
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from twofold.errors import require
from twofold.request import BlockKey, Request
from twofold.workload.blocks import session_keys
from twofold.workload.distributions import REPLAY
from twofold.workload.rescale import mean_rate
from twofold.workload.source import is_named, workload

_SAMPLE = 4096  # requests averaged
_MOST_REQUESTS = 100_000  # of a trace
# Draws of a trace: -1 is all of it. Draw 0, for searches, is a window of high load: designs that win on a quiet window
# may lose on others. Draws from 1 on are random parts.
WHOLE = -1
_STARTS, _SHARE = 40, 0.1  # windows compared by load, and their share of the trace
_HIGH = 0.9  # quantile of the loads
# The mean over a random third of n blocks, drawn without replacement, differs from the mean over all of them with a
# variance of (1 - 1/3) / (n / 3) = 2 / n that of a block: as much as the means of two such traces differ, if blocks are
# long enough to be independent. A third is replayed three times in a row: in a shorter run, the start with an empty
# cluster would count for more than in the trace.
_BLOCKS, _PARTS = 12, 3
_MOST_DRAWN = 5_000  # requests of a part
_arrival = attrgetter("arrival_s")


class WorkloadArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a workload, except its rate."""

    # Arguments of `twofold.workload.source.workload`.
    workload: str
    duration_s: float = 120.0  # of arrivals, or longer until there are `min_requests`
    min_requests: int = 500
    start_s: float = 0.0
    arrival: str | None = None
    burstiness: float = 1.0
    length_scale: float = 1.0
    max_model_len: int | None = None
    seed: int = 0  # the same at all rates, so that designs are compared fairly
    draw: int = 0  # part of a trace

    def drawn(self, draw: int) -> "WorkloadArguments":
        """Return another draw of this workload: with another random seed, or another part of a trace."""
        if draw and self.random:
            return replace(self, seed=self.seed + draw)
        return replace(self, draw=draw)

    @property
    def random(self) -> bool:
        """Whether different seeds give different requests."""
        # A trace replayed with its own arrival times is not random.
        return is_named(self.workload) or self.arrival not in (None, REPLAY)

    def requests(self, rate: float) -> list[Request]:
        """Generate the requests at `rate` requests/s. Raises ConfigurationError if there are none."""
        duration_s = max(self.duration_s, self.min_requests / rate)
        found = _requests(self, rate, duration_s=duration_s) if self.random else self._part(rate, duration_s)
        require(bool(found), f"workload {self.workload} gives no request in {duration_s:g} s at {rate:g} requests/s")
        return found

    def shape(self) -> "WorkloadShape":
        """Return token counts of requests, computed from a sample."""
        if is_named(self.workload):
            return WorkloadShape.of(_requests(self, 1.0, num_requests=_SAMPLE))
        return WorkloadShape.of(self.trace[:: max(1, len(self.trace) // _SAMPLE)])

    def computed_tokens(self, block_tokens: int) -> float:
        """Return the mean number of prompt tokens that an infinite cache, with blocks of this size, does not have."""
        requests = _requests(self, 1.0, num_requests=_SAMPLE) if is_named(self.workload) else self.trace
        known, computed = set[BlockKey](), 0
        for request in requests:
            tokens = request.prompt_tokens + request.output_tokens - 1  # with KV at the end
            keys = request.prefix_blocks or (session_keys(request, tokens, block_tokens) if request.session else ())
            found = sum(1 for _ in takewhile(known.__contains__, keys))
            computed += max(1, request.prompt_tokens - found * block_tokens)
            known.update(keys)
        return computed / len(requests)

    @property
    def description(self) -> str:
        """Part of the workload that the simulations use, in words."""
        each = f"{self.duration_s:g} s of arrivals, at least {self.min_requests:,} requests, in each simulation"
        if self.random:
            return f"{self.workload}: {each}"
        most = " first" if len(self.trace) == _MOST_REQUESTS else ""
        return f"the{most} {len(self.trace):,} requests of {Path(self.workload).name}; in the search a window: {each}"

    def digest(self) -> str:
        """Return the SHA-256 hash of the trace file; empty for a named workload."""
        if is_named(self.workload):
            return ""
        return _file_digest(Path(self.workload))

    @property
    def trace(self) -> tuple[Request, ...]:
        """Requests of the trace from its start on, at most 100,000. The first arrives at time 0."""
        return _trace(self._of_trace)

    @property
    def _of_trace(self) -> "WorkloadArguments":
        """Arguments with which all windows of a trace have one cache entry."""
        return replace(self, duration_s=1.0, min_requests=1, seed=0, draw=0)

    def _part(self, rate: float, duration_s: float) -> list[Request]:
        """Return a part of the trace, replayed at a mean rate of `rate` requests/s over the whole trace.

        Times are scaled by a single factor, so that parts keep the bursts of the trace and its busy and quiet times.
        """
        own = mean_rate(self.trace) or rate
        require(math.isfinite(own), "all requests arrive at the same time, so they have no rate: generate new arrivals")
        part = self._blocks(own) if self.draw else self._busy(own, duration_s * rate / own)
        return [replace(request, arrival_s=request.arrival_s * own / rate) for request in part]

    def _busy(self, rate: float, duration_s: float) -> list[Request]:
        """Return a window of high load. A window that reaches the end of the trace goes on at its start."""
        trace, period_s = self.trace, len(self.trace) / rate
        by_load = _starts_by_load(self._of_trace)
        start_s = by_load[int(len(by_load) * _HIGH)] * period_s
        first = bisect_left(trace, start_s, key=_arrival)
        again = (replace(request, arrival_s=request.arrival_s + period_s) for request in trace[:first])
        end_s = start_s + min(duration_s, period_s)
        found = takewhile(lambda request: request.arrival_s < end_s, chain(trace[first:], again))
        return [replace(request, arrival_s=request.arrival_s - start_s) for request in found]

    def _blocks(self, rate: float) -> list[Request]:
        """Return the whole trace, or a random part of its blocks, in their order and without the gaps, three times."""
        trace, width_s = self.trace, len(self.trace) / rate / _BLOCKS
        edges = [bisect_left(trace, block * width_s, key=_arrival) for block in range(_BLOCKS)]
        drawn = self._drawn_blocks
        found = (
            _again(request, turn, request.arrival_s + (turn * len(drawn) + place - block) * width_s)
            for turn in range(1 if self.draw == WHOLE else _PARTS)
            for place, block in enumerate(drawn)
            for request in trace[edges[block] : (*edges, len(trace))[block + 1]]
        )
        return sorted(found, key=_arrival)  # rounding may swap requests at edges

    @property
    def _drawn_blocks(self) -> Sequence[int]:
        if self.draw == WHOLE:
            return range(_BLOCKS)
        parts = min(max(_PARTS, math.ceil(len(self.trace) / _MOST_DRAWN)), _BLOCKS)
        shuffle, part = divmod(self.draw - 1, parts)
        return sorted(np.random.default_rng(shuffle).permutation(_BLOCKS)[part::parts].tolist())


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a workload's requests: means, and percentiles 0 to 100 of the prompts."""

    prompt_tokens: float
    decode_tokens: float  # output tokens after the first
    context_tokens: float  # KV tokens read by all decode iterations of a request
    prompt_percentiles: tuple[int, ...]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "WorkloadShape":
        count = len(requests)
        require(count > 0, "the workload has no requests")
        steps = [request.output_tokens - 1 for request in requests]
        read = sum(n * request.prompt_tokens + n * (n + 1) // 2 for n, request in zip(steps, requests, strict=True))
        prompts = sorted(request.prompt_tokens for request in requests)
        return cls(
            prompt_tokens=sum(prompts) / count,
            decode_tokens=sum(steps) / count,
            context_tokens=read / count,
            prompt_percentiles=tuple(prompts[round((count - 1) * each / 100)] for each in range(101)),
        )

    @property
    def context(self) -> float:
        """Mean number of KV tokens read to decode one token."""
        return self.context_tokens / self.decode_tokens if self.decode_tokens else 0.0


def _again(request: Request, turn: int, arrival_s: float) -> Request:
    """Return a copy of a request; in turns after the first, as another request, which finds no KV of those before."""
    if not turn:
        return replace(request, arrival_s=arrival_s)
    keys = tuple(key + (turn << 64) if isinstance(key, int) else key for key in request.prefix_blocks)
    session = request.session and f"{request.session}/{turn}"
    return replace(request, id=f"{request.id}/{turn}", arrival_s=arrival_s, prefix_blocks=keys, session=session)


@lru_cache(maxsize=2)
def _trace(arguments: WorkloadArguments) -> tuple[Request, ...]:
    requests = _requests(replace(arguments, arrival=None, burstiness=1.0), None, num_requests=_MOST_REQUESTS)
    return tuple(replace(each, arrival_s=each.arrival_s - requests[0].arrival_s) for each in requests)


def _requests(
    arguments: WorkloadArguments,
    rate: float | None,
    *,
    duration_s: float | None = None,
    num_requests: int | None = None,
) -> list[Request]:
    names = ("start_s", "arrival", "burstiness", "length_scale", "max_model_len", "seed")
    shape = {name: getattr(arguments, name) for name in names}
    return list(workload(arguments.workload, rate=rate, duration_s=duration_s, num_requests=num_requests, **shape))


@lru_cache(maxsize=2)
def _starts_by_load(arguments: WorkloadArguments) -> tuple[float, ...]:
    """Return starts of windows, as shares of the trace, by ascending load: that of prefill or decode, if higher."""
    trace = arguments.trace
    ends_s = trace[-1].arrival_s or 1.0
    slots = np.array([int(request.arrival_s / ends_s * _STARTS) % _STARTS for request in trace])
    wide = round(_STARTS * _SHARE)
    loads = []
    for tokens in ([each.prompt_tokens for each in trace], [each.output_tokens for each in trace]):
        sums = np.bincount(slots, weights=tokens, minlength=_STARTS)
        around = np.concatenate([sums, sums[: wide - 1]])
        loads.append(np.convolve(around, np.ones(wide), mode="valid") / sums.mean())
    return tuple(float(place) / _STARTS for place in np.argsort(np.maximum(*loads), kind="stable"))


@lru_cache(maxsize=8)
def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
