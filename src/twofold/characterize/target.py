"""Interface of a characterization target: an instance of a model that runs streams and reports their token times."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from twofold.errors import UserError


class TargetError(UserError):
    """Error of a target that failed or refused a request. Measurements made before the error are kept."""


class ProbeStream(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a probe: a random prompt of `prompt_tokens` tokens and exactly `output_tokens` output tokens.

    With `after_tokens` 0, the request is sent at once. Otherwise it is sent when every stream that was sent at once has
    `after_tokens` output tokens. Streams with the same `prompt` number have the same prompt; all other prompts are new
    to every cache.
    """

    prompt_tokens: int
    output_tokens: int
    after_tokens: int = 0
    prompt: int | None = None


class StreamTimes(msgspec.Struct, frozen=True):
    """Times of one stream, in seconds on a monotonic clock: when it was sent, and when each output token arrived."""

    sent_s: float
    token_times_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s


class TargetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a target; a limit is None if it is unknown.

    `max_num_batched_tokens` limits the tokens of an iteration; longer prompts are computed in chunks. `remote` is set
    if measured times include the transport of requests, such as HTTP. `disaggregated` is set if prefill and decode run
    on different instances; then only KV transfers are measured.
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
        """Run the streams together and return the times of each, in the order of `streams`.

        Raises TargetError if a stream fails.
        """

    def close(self) -> None:
        """Release the target's resources."""
