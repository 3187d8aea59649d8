"""Interface of a target of characterization: an instance of a model that runs streams and reports their token times."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from twofold.errors import UserError


class TargetError(UserError):
    """The target failed or refused a request. Measurements made before are kept."""


class ProbeStream(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a probe: a random prompt of `prompt_tokens` tokens and exactly `output_tokens` output tokens.

    It is sent when every stream with `after_tokens` 0 has `after_tokens` output tokens. Two streams with the same
    `prompt` number have the same prompt; all other prompts are new to every cache.
    """

    prompt_tokens: int
    output_tokens: int
    after_tokens: int = 0
    prompt: int | None = None


class StreamTimes(msgspec.Struct, frozen=True):
    """When a stream was sent and when each of its output tokens arrived, in seconds on one monotonic clock."""

    sent_s: float
    token_times_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s


class TargetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a target; None if unknown.

    `max_num_batched_tokens` limits the tokens of an iteration: longer prompts are computed in chunks of this size.
    `remote` is set if times include the transport of requests, such as HTTP. `disaggregated` is set if prefill and
    decode run on different instances: then only KV transfers are measured.
    """

    max_model_len: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    remote: bool = False
    disaggregated: bool = False


class Target(Protocol):
    """An instance that runs streams. `engine` names its software and version."""

    engine: str
    limits: TargetLimits

    def run(self, streams: Sequence[ProbeStream]) -> list[StreamTimes]:
        """Run streams together and return their times, in the same order; raises TargetError if one fails."""

    def close(self) -> None:
        """Release the target's resources."""
