"""Performance model of SplitwiseSim, for reproducing the paper's figures, not for planning."""

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
    """Function of x that interpolates linearly between points and extrapolates beyond both ends."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        if len(xs) != len(ys) or len(xs) < 2:
            raise ConfigurationError(f"interpolation needs at least two points, each with an x and a y, not {len(xs)}")
        if any(right <= left for left, right in pairwise(xs)):
            raise ConfigurationError("interpolation points must be in ascending order of x")
        # Converted once, because floats compare fastest with floats and a simulator evaluates millions of points.
        self._xs = [float(x) for x in xs]
        self._ys = [float(y) for y in ys]
        self._slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]

    def at(self, x: float) -> float:
        """Return the value of the function at `x`."""
        # Compiled code calls a method named `at` faster than `__call__`.
        i = min(max(bisect_right(self._xs, x) - 1, 0), len(self._slopes) - 1)
        return self._ys[i] + self._slopes[i] * (x - self._xs[i])


_MIXED = 1.1


# Two piecewise linear curves, of prefill times and of decode times over x = prompt size × batch size, interpolate
# between the medians of Splitwise's profile and extrapolate beyond both ends.
#
# - A prefill takes the value of the prompt curve at x = all its prompt tokens.
# - A decode iteration takes the value of the token curve at x = *number of sequences*, which is far below the measured
#   range. Decode batching is therefore almost free, and context has no influence.
# - A mixed iteration takes 1.1 × the value of the prompt curve at x = prompt tokens + decodes.
class SplitwisePublishedModel(PerformanceModel):
    """Performance model with SplitwiseSim's latency curves for one LLM on one machine."""

    def __init__(self, knots: Knots, model: Model, machine: Machine, tensor_parallel: int) -> None:
        self.name = instance_name("splitwise-published", model, machine, tensor_parallel)
        self.error = ModelAccuracy(
            prefill=None, decode=None, basis="SplitwiseSim's interpolation, known to be wrong for decode batches"
        )
        self._prompt_s = PiecewiseLinear(knots.tokens, knots.prompt_s)
        self._token_s = PiecewiseLinear(knots.tokens, knots.token_s)
        used = memory_share(model, machine, tensor_parallel, self._token_s.at(1))
        self.power = instance_power(machine, tensor_parallel, memory_share=used)

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._above_zero(self._prompt_s.at(tokens), tokens)

    def decode_cost(self, sequences: int) -> DecodeCost:
        return DecodeCost(self._above_zero(self._token_s.at(sequences), sequences), 0.0)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        return _MIXED * self._above_zero(self._prompt_s.at(tokens + sequences), tokens + sequences)

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Return (TTFT, TPOT) in seconds of a request that runs alone, as in SplitwiseSim's notebooks."""
        return self._prompt_s.at(prompt_tokens), self._token_s.at(prompt_tokens)

    def _above_zero(self, seconds: float, tokens: int) -> float:
        if seconds <= 0:
            raise ConfigurationError(
                f"{self.name} extrapolates to a negative time for {tokens:,} batched tokens: use `fitted`"
            )
        return seconds


def splitwise_published(model: Model, machine: Machine, tensor_parallel: int) -> SplitwisePublishedModel:
    """Return SplitwiseSim's performance model. Raises ConfigurationError for an unmeasured LLM or accelerator."""
    knots = require_pair(published_knots().knots, model, machine, tensor_parallel, "published profile")
    return SplitwisePublishedModel(knots, model, machine, tensor_parallel)
