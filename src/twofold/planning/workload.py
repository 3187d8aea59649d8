"""Workload that a plan simulates at different rates, and mean token counts of its requests."""

import hashlib
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from twofold.errors import require
from twofold.request import Request
from twofold.workload.distributions import REPLAY
from twofold.workload.source import is_named, workload

_SAMPLE = 4096  # requests averaged


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

    def drawn(self, draw: int) -> "WorkloadArguments":
        """Return this workload with `draw` added to the random seed."""
        return replace(self, seed=self.seed + draw) if draw else self

    @property
    def random(self) -> bool:
        """Whether different seeds give different requests."""
        # A trace replayed with its own arrival times is not random.
        return is_named(self.workload) or self.arrival not in (None, REPLAY)

    def requests(self, rate: float) -> list[Request]:
        """Generate the requests at `rate` requests/s. Raises ConfigurationError if there are none."""
        duration_s = max(self.duration_s, self.min_requests / rate)
        found = self._requests(rate, duration_s=duration_s)
        require(bool(found), f"workload {self.workload} gives no request in {duration_s:g} s at {rate:g} requests/s")
        return found

    def shape(self) -> "WorkloadShape":
        """Return mean token counts per request, computed from a sample."""
        return WorkloadShape.of(self._requests(1.0, num_requests=_SAMPLE))

    def digest(self) -> str:
        """Return the SHA-256 hash of the trace file; empty for a named workload."""
        if is_named(self.workload):
            return ""
        return _file_digest(Path(self.workload))

    def _requests(
        self, rate: float, *, duration_s: float | None = None, num_requests: int | None = None
    ) -> list[Request]:
        names = ("start_s", "arrival", "burstiness", "length_scale", "max_model_len", "seed")
        shape = {name: getattr(self, name) for name in names}
        return list(workload(self.workload, rate=rate, duration_s=duration_s, num_requests=num_requests, **shape))


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """Mean token counts of a workload's requests."""

    prompt_tokens: float
    decode_tokens: float  # output tokens after the first
    context_tokens: float  # KV tokens read by all decode iterations of a request

    @classmethod
    def of(cls, requests: list[Request]) -> "WorkloadShape":
        count = len(requests)
        require(count > 0, "the workload has no requests")
        steps = [request.output_tokens - 1 for request in requests]
        read = sum(n * request.prompt_tokens + n * (n + 1) // 2 for n, request in zip(steps, requests, strict=True))
        return cls(
            prompt_tokens=sum(request.prompt_tokens for request in requests) / count,
            decode_tokens=sum(steps) / count,
            context_tokens=read / count,
        )

    @property
    def context(self) -> float:
        """Mean number of KV tokens read to decode one token."""
        return self.context_tokens / self.decode_tokens if self.decode_tokens else 0.0


@lru_cache(maxsize=8)
def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
