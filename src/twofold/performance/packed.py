"""Times of an engine that packs all tokens of an iteration into one matrix, fitted to iterations of a live worker.

With n prompt tokens and b decodes in an iteration, S the squares of its prompts (see `PerformanceModel.prefill_s`) and
C the KV tokens that its decodes read:

    iteration(n, S, b, C) = base + f(n + b) + q·S + s·b + c·C

- f, what the linear layers take, is made of straight lines that bend at 3, 4, 8, 32, 128 and 512 tokens: small matrices
  use a processor less well than large ones, and from the fourth row on a CPU's library takes another, slower way than
  for three. No slope is below 0, so no larger batch is faster.
- q is attention within prompts, c attention of decodes over what they read, s what a decode costs besides.
- One formula serves prefill, decode and mixed iterations alike, as one code runs them.
- Computing and reading memory have speeds of their own on a host that others share: `decode_factor` is how many times
  longer iterations without prompts take than the formula says.
- A worker that ran nothing for a while takes `cold_s` longer for its next iteration: a core that slept, and caches that
  others filled meanwhile.
"""

from itertools import pairwise
from typing import Final

import msgspec

from twofold.performance.alone import alone
from twofold.performance.base import DecodeCost, ModelError, PerformanceModel

COLD_AFTER_S: Final = 0.03  # without work
BENDS: Final = (0, 3, 4, 8, 32, 128, 512)


class PackedTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds: see the module for the formula. `token_s` are the slopes of f from each of its bends on.

    Errors are mean absolute relative errors of iterations that the fit had not seen, by kind.
    """

    base_s: float
    token_s: tuple[float, ...]
    square_s: float
    sequence_s: float
    context_s: float
    cold_s: float = 0.0
    decode_factor: float = 1.0
    prefill_error: float | None = None
    decode_error: float | None = None
    mixed_error: float | None = None
    iterations: int = 0

    def seconds(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """An iteration of `tokens` prompt tokens beside `sequences` decodes that read `context` KV tokens."""
        packed = spread(tokens + sequences)
        linear_s = sum(slope * part for slope, part in zip(self.token_s, packed, strict=True))
        attention_s = self.square_s * squares + self.context_s * context
        seconds = self.base_s + linear_s + attention_s + self.sequence_s * sequences
        return seconds if tokens else seconds * self.decode_factor

    def slower(self, factor: float, decodes: float | None = None) -> "PackedTimes":
        """All times that many times longer; with `decodes` those of iterations without prompts that many times."""
        return msgspec.structs.replace(
            self,
            base_s=self.base_s * factor,
            token_s=tuple(slope * factor for slope in self.token_s),
            square_s=self.square_s * factor,
            sequence_s=self.sequence_s * factor,
            context_s=self.context_s * factor,
            cold_s=self.cold_s * factor,
            decode_factor=self.decode_factor * (1.0 if decodes is None else decodes / factor),
        )


def spread(tokens: float) -> list[float]:
    """How many of the tokens lie between one bend and the next."""
    ends = (*BENDS, float("inf"))
    return [min(max(tokens - low, 0), high - low) for low, high in pairwise(ends)]


class PackedModel(PerformanceModel):
    """The formula of this module for one worker of a host. What it draws was not measured, and counts as nothing."""

    def __init__(self, name: str, times: PackedTimes) -> None:
        self.name = name
        self.times = times
        self.error = ModelError(
            prefill=times.prefill_error,
            decode=times.decode_error,
            basis=f"a fit to {times.iterations} iterations of a live worker",
        )

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self.times.seconds(tokens, squares, 0, 0)

    def decode_cost(self, sequences: int) -> DecodeCost:
        times = self.times
        return DecodeCost(times.seconds(0, 0, sequences, 0), times.context_s * times.decode_factor)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        return self.times.seconds(tokens, squares, sequences, context)

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        return alone(self, prompt_tokens, output_tokens)

    @property
    def idle_w(self) -> float:
        return 0.0

    def prefill_w(self, tokens: int) -> float:  # noqa: ARG002 (nobody measured it)
        return 0.0

    def decode_w(self, sequences: int) -> float:  # noqa: ARG002
        return 0.0
