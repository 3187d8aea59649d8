"""Roofline estimate of iteration times, from the LLM's FLOPs and bytes and the machine's peak rates."""

import math
from functools import cache
from statistics import fmean

import msgspec

from twofold.hardware.specs import Machine, Model
from twofold.performance.base import PerformanceModel
from twofold.performance.coefficients import MeasuredPair, data_bytes
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.fitted import KNEE, long_share
from twofold.performance.instance import (
    check_tensor_parallel,
    find_pair,
    instance_name,
    memory_share,
    resident_kv_bytes_per_token,
)
from twofold.performance.power import instance_power

_CAPPED_SLOWDOWN, _CAP = 1.3, 0.5


class RooflineConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the roofline formulas: fractions of peak rates, and seconds per layer."""

    compute_efficiency: float
    interconnect_efficiency: float
    memory_efficiency: float
    kv_efficiency: float
    launch_s: float
    step_s: float
    prefill_launch_s: float
    sequence_s: float
    long_batch: float  # relative extra cost of a token in long batches


class LeftOut(MeasuredPair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roofline errors for one measured LLM and machine, with constants fitted to the other measurements."""

    prefill_error: float
    decode_error: float


class RooflineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of roofline.toml, written by bench/splitwise/fit_roofline.py."""

    source: str
    date: str
    constants: RooflineConstants
    left_out: list[LeftOut]


# Let n be the number of prompt tokens in a batch, S their `squares` (see `PerformanceModel.prefill_s`), b the number of
# decodes and C the number of KV tokens that the decodes read:
#
#     overhead      layers · (launch + step · log2 TP), for kernels and all-reduce latency
#     weights(b)    bytes of the weights that b tokens touch / (TP · bandwidth · efficiency)
#     token         2 · active parameters / (TP · FLOP/s · efficiency)
#                   + all-reduce of a token / (interconnect · efficiency)
#     floor(n)      overhead + layers · prefill launch + weights(n)
#     prefill(n, S) (floor(n)^p + (token·n)^p)^(1/p) + long·token·n·w(n) + attention·S
#     decode(b, C)  overhead + weights(b) + sequence·layers·b + token·b + kv·C
#     mixed         max(prefill(n, S), overhead + weights(b)) + the last three terms of decode
#
# The exponent p and the weight w(n) are defined in `twofold.performance.fitted`. Each layer has two all-reduces, each
# of hidden_size values per token; for each value, an accelerator sends and receives 2·(TP − 1)/TP values. In a mixture
# of experts, b tokens touch 1 − (1 − active/all)^b of the weights, which is the expectation for independent, even
# routing.
#
# Efficiencies and overheads are the same for all pairs of LLM and machine. bench/splitwise/fit_roofline.py fitted them
# to pairs measured with one serving stack of 2023; newer stacks are faster. Against DistServe's latency model of OPT on
# A100, the mean error is 8% for prefill and 22% for decode. No pair with TP 1 was measured. A power cap does not slow
# decode; it slows prefill linearly, by a factor of 1.3 at half the TDP (Splitwise).
class RooflineModel(PerformanceModel):
    """Roofline estimate of the iteration times of one LLM on one machine."""

    def __init__(
        self, constants: RooflineConstants, error: ModelAccuracy, model: Model, machine: Machine, tensor_parallel: int
    ) -> None:
        self.name = instance_name("roofline", model, machine, tensor_parallel)
        self.error = error
        needs = RooflineTerms.of(model, machine, tensor_parallel)
        self._slowdown = 1.0 + (_CAPPED_SLOWDOWN - 1.0) * (1.0 - machine.power_cap) / (1.0 - _CAP)
        self._token_s = (
            needs.compute_s / constants.compute_efficiency + needs.all_reduce_s / constants.interconnect_efficiency
        )
        self._square_s = needs.attention_s / constants.compute_efficiency
        self._context_s = needs.kv_s / constants.kv_efficiency
        self._weights_s = needs.weights_s / constants.memory_efficiency
        self._active = needs.active
        self._overhead_s = needs.layers * constants.launch_s + needs.steps * constants.step_s
        self._prefill_launch_s = needs.layers * constants.prefill_launch_s
        self._sequence_s = needs.layers * constants.sequence_s + self._token_s
        self._long_batch = constants.long_batch
        used = memory_share(model, machine, tensor_parallel, self.decode_cost(1).base_s)
        self.power = instance_power(machine, tensor_parallel, memory_share=used)

    def prefill_s(self, tokens: int, squares: int) -> float:
        floor_s = self._overhead_s + self._prefill_launch_s + self._touched_s(tokens)
        linear_s = self._token_s * tokens
        short_s: float = (floor_s**KNEE + linear_s**KNEE) ** (1 / KNEE)
        long_s = self._long_batch * linear_s * long_share(tokens)
        return self._slowdown * (short_s + long_s + self._square_s * squares)

    def decode_cost(self, sequences: int) -> DecodeCost:
        base_s = self._overhead_s + self._touched_s(sequences) + self._sequence_s * sequences
        return DecodeCost(base_s, self._context_s)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        alone_s = max(self.prefill_s(tokens, squares), self._overhead_s + self._touched_s(sequences))
        return alone_s + self._sequence_s * sequences + self._context_s * context

    def _touched_s(self, tokens: int) -> float:
        if self._active == 1.0:
            return self._weights_s
        return self._weights_s * (1.0 - (1.0 - self._active) ** tokens)


class RooflineTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Compute, memory and communication times of an LLM at the peak rates of a machine."""

    compute_s: float
    all_reduce_s: float
    attention_s: float
    kv_s: float
    weights_s: float
    active: float  # share of parameters used per token
    layers: int
    steps: float  # layers · log2 TP

    @classmethod
    def of(cls, model: Model, machine: Machine, tensor_parallel: int) -> "RooflineTerms":
        """Calculate the roofline times of an LLM on `tensor_parallel` accelerators of a machine."""
        accelerator = machine.accelerator
        flops_per_s = tensor_parallel * accelerator.flops_per_s
        bytes_per_s = tensor_parallel * accelerator.memory_bytes_per_s
        sent = 2 * (tensor_parallel - 1) / tensor_parallel * 2 * model.hidden_size * model.dtype_bytes
        kv_bytes = resident_kv_bytes_per_token(model, tensor_parallel)
        return cls(
            compute_s=2 * model.active_parameters / flops_per_s,
            all_reduce_s=model.layers * sent / accelerator.interconnect_bytes_per_s if sent else 0.0,
            # S counts each attended pair of tokens twice; a pair costs 4 FLOPs per head value
            attention_s=2 * model.layers * model.heads * model.head_dim / flops_per_s,
            kv_s=kv_bytes / bytes_per_s,
            weights_s=model.weight_bytes / bytes_per_s,
            active=min(model.active_parameters / model.parameters, 1.0),
            layers=model.layers,
            steps=model.layers * math.log2(tensor_parallel),
        )


def roofline_with(
    constants: RooflineConstants,
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    error: ModelAccuracy | None = None,
) -> RooflineModel:
    """Return a roofline model with custom constants."""
    check_tensor_parallel(machine, tensor_parallel)
    unknown = ModelAccuracy(prefill=None, decode=None, basis="roofline with custom constants", estimated=True)
    return RooflineModel(constants, error or unknown, model, machine, tensor_parallel)


def roofline(model: Model, machine: Machine, tensor_parallel: int) -> RooflineModel:
    """Return a performance model estimated from FLOPs and bandwidths, for any LLM on any machine."""
    data = _data()
    known = find_pair(data.left_out, model, machine, tensor_parallel)
    return roofline_with(data.constants, model, machine, tensor_parallel, _error(data.left_out, known))


def _error(left_out: list[LeftOut], known: LeftOut | None) -> ModelAccuracy:
    # Each error on a measured pair is measured with constants fitted to all other pairs.
    if known is not None:
        basis = "roofline fitted to other measured pairs"
        return ModelAccuracy(prefill=known.prefill_error, decode=known.decode_error, basis=basis, estimated=True)
    return ModelAccuracy(
        prefill=round(fmean(one.prefill_error for one in left_out), 3),
        decode=round(fmean(one.decode_error for one in left_out), 3),
        basis=f"roofline fitted to {len(left_out)} measured pairs; errors are those on each when left out",
        estimated=True,
    )


@cache
def _data() -> RooflineFile:
    return msgspec.toml.decode(data_bytes("roofline.toml"), type=RooflineFile)
