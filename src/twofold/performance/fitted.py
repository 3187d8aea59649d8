"""Performance model with coefficients that were fitted to a measured profile.

The times of a prefill iteration, a decode iteration and a mixed iteration are, in seconds,

    prefill(n, S) = (floor^p + (a·n)^p)^(1/p) + e·n·w(n) + q·S
    decode(b, C)  = t0 + k·b + k2·max(b − 32, 0) + c·C
    mixed         = max(prefill(n, S), t0) + decode(b, C) − t0

with the variables

    n     prompt tokens that the iteration computes
    S     attention work of the prompts (see `PerformanceModel.prefill_s`)
    b     decoded sequences
    C     KV tokens that the decodes read
    w(n)  0 up to 2,048 tokens, 1 from 4,096 tokens on, and linear in between

and p = 2.5. The other coefficients are fitted.
"""

from collections.abc import Sequence
from pathlib import Path

from twofold.hardware.specs import Machine, Model
from twofold.performance.base import PerformanceModel
from twofold.performance.coefficients import Calibration, calibrations
from twofold.performance.cost import DecodeCost, MeasuredSizes, ModelAccuracy
from twofold.performance.instance import find_pair, instance_name, memory_share, require_pair
from twofold.performance.power import instance_power

# - Weight reads and kernel launches limit short prefills (floor), and compute limits long prefills (a). The exponent p
#   smooths the transition. The cost of attention is q·S.
# - Throughput falls beyond 2,048 batched tokens (Splitwise, figure 6). From 4,096 tokens on, each token costs e extra.
#   The weight w is assumed to rise linearly from 0 to 1 in between, where the profile has no sizes.
# - Each decode costs k, each decode beyond the 32nd costs k2 more, and each KV token read costs c.
# - A mixed iteration is assumed to read the weights only once, so the decodes do not add t0 again.
#
# All coefficients are ≥ 0, so no time falls when an argument grows.

KNEE = 2.5
LONG_TOKENS, FULL_LONG_TOKENS = 2048, 4096
LARGE_BATCH = 32


class FittedModel(PerformanceModel):
    """Performance model with the formulas of this module and the coefficients of one calibration."""

    def __init__(self, calibration: Calibration, model: Model, machine: Machine, tensor_parallel: int) -> None:
        self.name = instance_name("fitted", model, machine, tensor_parallel)
        self.calibration = calibration
        self.error = ModelAccuracy(
            prefill=calibration.prefill_error,
            decode=calibration.decode_error,
            basis=calibration.basis,
            measured=MeasuredSizes(prompt_tokens=calibration.max_prompt_tokens, sequences=calibration.max_sequences),
        )
        prefill, decode = calibration.prefill, calibration.decode
        self._floor = (prefill.floor_ms / 1e3) ** KNEE
        self._token_s = prefill.token_ms / 1e3
        self._long_token_s = prefill.long_token_ms / 1e3
        self._square_s = prefill.square_ms / 1e3
        self._base_s = decode.base_ms / 1e3
        self._sequence_s = decode.sequence_ms / 1e3
        self._large_batch_s = decode.large_batch_ms / 1e3
        self._context_s = decode.context_ms / 1e3
        used = memory_share(model, machine, tensor_parallel, self.decode_cost(1).base_s)
        measured = calibration.decode_power
        self.power = instance_power(machine, tensor_parallel, memory_share=used, decode_share=measured)

    def prefill_s(self, tokens: int, squares: int) -> float:
        short_s: float = (self._floor + (self._token_s * tokens) ** KNEE) ** (1 / KNEE)
        return short_s + self._long_token_s * tokens * long_share(tokens) + self._square_s * squares

    def decode_cost(self, sequences: int) -> DecodeCost:
        return DecodeCost(self._base_s + self._sequences_s(sequences), self._context_s)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        prefill_s = max(self.prefill_s(tokens, squares), self._base_s)
        return prefill_s + self._sequences_s(sequences) + self._context_s * context

    def _sequences_s(self, sequences: int) -> float:
        return self._sequence_s * sequences + self._large_batch_s * max(sequences - LARGE_BATCH, 0)


def long_share(tokens: float) -> float:
    """Return w(n) of this module's prefill formula: the weight of the extra time of long batches, from 0 to 1.

    The weight is 0 up to 2,048 tokens, 1 from 4,096 tokens on, and linear in between.
    """
    return min(max((tokens - LONG_TOKENS) / (FULL_LONG_TOKENS - LONG_TOKENS), 0.0), 1.0)


def fitted(model: Model, machine: Machine, tensor_parallel: int, *, extra: Sequence[Path] = ()) -> FittedModel:
    """Return the performance model fitted to this LLM and accelerator. Raises ConfigurationError if there is none."""
    # Calibrations in `extra` take precedence.
    entry = require_pair(calibrations(extra), model, machine, tensor_parallel, "calibration")
    return FittedModel(entry, model, machine, tensor_parallel)


def is_fitted(model: Model, machine: Machine, tensor_parallel: int) -> bool:
    """Return whether a calibration exists for this LLM, accelerator and tensor parallelism."""
    return find_pair(calibrations(), model, machine, tensor_parallel) is not None
