"""Interface of a characterization target: an instance of a model that runs requests and reports their token times."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from twofold.errors import UserError


class TargetError(UserError):
    """Error of a target that failed or refused a request. Earlier measurements are kept."""


class ProbeStream(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a probe: a random prompt of `prompt_tokens` tokens and exactly `output_tokens` output tokens."""

    prompt_tokens: int
    output_tokens: int
    after_tokens: int = 0  # output tokens that each request sent at once has when this one is sent; 0: sent at once
    prompt: int | None = None  # requests with equal numbers have the same prompt; None: a prompt that no cache has


class StreamTimes(msgspec.Struct, frozen=True):
    """Sending time of one request, and arrival time of each token, in seconds of time.monotonic()."""

    sent_s: float
    token_times_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s


class TargetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the instance or endpoint to characterize; None if unknown."""

    max_model_len: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None  # longer prompts are computed in chunks
    kv_capacity_tokens: int | None = None
    remote: bool = False  # times include the transport of requests, such as HTTP
    disaggregated: bool = False  # only KV transfers are measured


class Target(Protocol):
    """An instance or endpoint that runs probes, which measure its prefill and decode times."""

    engine: str  # name and version of its software
    limits: TargetLimits

    def run(self, streams: Sequence[ProbeStream]) -> list[StreamTimes]:
        """Run the requests in `streams` together. Return each one's token times. Raises TargetError if one fails."""

    def close(self) -> None:
        """Release the target's resources."""
