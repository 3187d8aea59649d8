"""The performance model of SplitwiseSim, exactly as it computes, to reproduce the paper's figures. Not for planning.

Both times are piecewise linear in x = prompt tokens × batch size through the medians of the profile, and extrapolated
beyond both ends. A prefill takes the prompt curve at all its tokens. A decode takes the token curve at x = *number of
sequences*, far below the measured range, so decode batching is almost free and context plays no part. A mixed iteration
takes 1.1 × the prompt curve at prompt tokens + decodes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from twofold.errors import ConfigurationError
from twofold.hardware.specs import Machine, Model
from twofold.performance.base import PerformanceModel
from twofold.performance.coefficients import Knots, published_knots
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.instance import instance_name, memory_share, require_pair
from twofold.performance.power import instance_power


class PiecewiseLinear:
    """Linear interpolation between points, extrapolated beyond both ends."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        if len(xs) != len(ys) or len(xs) < 2:
            raise ConfigurationError(f"interpolation needs at least two points, each with an x and a y, not {len(xs)}")
        if any(right <= left for left, right in pairwise(xs)):
            raise ConfigurationError("interpolation points must be in ascending order of x")
        # Converted once, because floats compare fastest with floats and a simulator evaluates millions of points.
        self._xs = [float(x) for x in xs]
        self._ys = [float(y) for y in ys]
        self._slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]

    def __call__(self, x: float) -> float:
        i = min(max(bisect_right(self._xs, x) - 1, 0), len(self._slopes) - 1)
        return self._ys[i] + self._slopes[i] * (x - self._xs[i])


_MIXED = 1.1


class SplitwisePublishedModel(PerformanceModel):
    """The prompt and token curves of one pair."""

    def __init__(self, knots: Knots, model: Model, machine: Machine, tensor_parallel: int) -> None:
        self.name = instance_name("splitwise-published", model, machine, tensor_parallel)
        self.error = ModelAccuracy(
            prefill=None, decode=None, basis="SplitwiseSim's interpolation, known to be wrong for decode batches"
        )
        self._prompt_s = PiecewiseLinear(knots.tokens, knots.prompt_s)
        self._token_s = PiecewiseLinear(knots.tokens, knots.token_s)
        used = memory_share(model, machine, tensor_parallel, self._token_s(1))
        self.power = instance_power(machine, tensor_parallel, memory_share=used)

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._above_zero(self._prompt_s(tokens), tokens)

    def decode_cost(self, sequences: int) -> DecodeCost:
        return DecodeCost(self._above_zero(self._token_s(sequences), sequences), 0.0)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        return _MIXED * self._above_zero(self._prompt_s(tokens + sequences), tokens + sequences)

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Both curves at x = prompt tokens, as the original's notebooks normalize latencies."""
        return self._prompt_s(prompt_tokens), self._token_s(prompt_tokens)

    def _above_zero(self, seconds: float, tokens: int) -> float:
        if seconds <= 0:
            raise ConfigurationError(
                f"{self.name} extrapolates to a negative time for {tokens:,} batched tokens: use `fitted`"
            )
        return seconds


def splitwise_published(model: Model, machine: Machine, tensor_parallel: int) -> SplitwisePublishedModel:
    """The published model of a pair. Raises ConfigurationError, listing the published pairs, for any other."""
    knots = require_pair(published_knots().knots, model, machine, tensor_parallel, "published profile")
    return SplitwisePublishedModel(knots, model, machine, tensor_parallel)
