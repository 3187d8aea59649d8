"""The requests that designs are tried with, at any rate, and what they need on average."""

import hashlib
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.request import Request
from twofold.workload.distributions import REPLAY
from twofold.workload.source import is_named, workload

_SAMPLE = 4096  # requests that averages are taken over


class WorkloadArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `workload` but its rate.

    `duration_s` seconds are simulated, or as many more as bring `min_requests`: percentiles of a handful of
    requests mean little. The seed is the same at all rates, so designs are compared on the same random numbers.
    """

    workload: str
    duration_s: float = 120.0
    min_requests: int = 500
    start_s: float = 0.0
    arrival: str | None = None
    burstiness: float = 1.0
    length_scale: float = 1.0
    max_model_len: int | None = None
    seed: int = 0

    def drawn(self, draw: int) -> "WorkloadArguments":
        """The same with other random numbers; draw 0 has those of the seed."""
        return replace(self, seed=self.seed + draw) if draw else self

    @property
    def random(self) -> bool:
        """Whether another draw is another workload: a trace at its own times is always the same."""
        return is_named(self.workload) or self.arrival not in (None, REPLAY)

    def requests(self, rate: float) -> list[Request]:
        """The requests at `rate` per second; raises as `workload` does, and where there are none."""
        duration_s = max(self.duration_s, self.min_requests / rate)
        found = self._requests(rate, duration_s=duration_s)
        if not found:
            raise ConfigurationError(
                f"workload {self.workload} gives no request in {duration_s:g} s at {rate:g} requests/s"
            )
        return found

    def shape(self) -> "WorkloadShape":
        """The averages of the workload."""
        return WorkloadShape.of(self._requests(1.0, num_requests=_SAMPLE))

    def digest(self) -> str:
        """A fingerprint of the trace file; empty for a named workload, which comes with the package."""
        if is_named(self.workload):
            return ""
        return _file_digest(Path(self.workload))

    def _requests(
        self, rate: float, *, duration_s: float | None = None, num_requests: int | None = None
    ) -> list[Request]:
        return list(
            workload(
                self.workload,
                rate=rate,
                duration_s=duration_s,
                num_requests=num_requests,
                start_s=self.start_s,
                arrival=self.arrival,
                burstiness=self.burstiness,
                length_scale=self.length_scale,
                max_model_len=self.max_model_len,
                seed=self.seed,
            )
        )


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """Means per request: prompt tokens, tokens that decode makes, and KV tokens that these read in all."""

    prompt_tokens: float
    decode_tokens: float
    context_tokens: float

    @classmethod
    def of(cls, requests: list[Request]) -> "WorkloadShape":
        count = len(requests)
        if not count:
            raise ConfigurationError("the workload has no requests to plan for")
        steps = [request.output_tokens - 1 for request in requests]
        read = sum(
            n * request.prompt_tokens + n * (n + 1) // 2 for n, request in zip(steps, requests, strict=True)
        )
        return cls(
            prompt_tokens=sum(request.prompt_tokens for request in requests) / count,
            decode_tokens=sum(steps) / count,
            context_tokens=read / count,
        )

    @property
    def context(self) -> float:
        """KV tokens that the mean decode reads."""
        return self.context_tokens / self.decode_tokens if self.decode_tokens else 0.0


@lru_cache(maxsize=8)
def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
