"""Interface of a characterization target: an instance of a model that runs requests and reports their token times."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from twofold.errors import UserError


class TargetError(UserError):
    """Error of a target that failed or refused a request. Earlier measurements are kept."""


class ProbeStream(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a probe: a random prompt of `prompt_tokens` tokens and exactly `output_tokens` output tokens.

    If `after_tokens` is 0, the request is sent at once; else when each request sent at once has `after_tokens` output
    tokens. Requests with the same number `prompt` have the same prompt; if it is None, no cache has the prompt.
    """

    prompt_tokens: int
    output_tokens: int
    after_tokens: int = 0
    prompt: int | None = None


class StreamTimes(msgspec.Struct, frozen=True):
    """Times of one stream (request of a probe), in monotonic seconds: when it was sent, and when each token arrived."""

    sent_s: float
    token_times_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s


class TargetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a target; None if unknown. Prompts over `max_num_batched_tokens` are computed in chunks. With `remote`,
    times include the transport of requests, such as HTTP. With `disaggregated`, only KV transfers are measured.
    """

    max_model_len: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    remote: bool = False
    disaggregated: bool = False


class Target(Protocol):
    """An instance that can be characterized. `engine` is the name and version of its software."""

    engine: str
    limits: TargetLimits

    def run(self, streams: Sequence[ProbeStream]) -> list[StreamTimes]:
        """Run the streams together; return their times in order. Raises TargetError if a stream fails."""

    def close(self) -> None:
        """Release the target's resources."""
