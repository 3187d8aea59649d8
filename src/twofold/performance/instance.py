"""Pipeline stages and KV capacity of an instance.

With L layers, S pipeline stages and an iteration time of t without a pipeline, the times are

    first stage   ⌈L / S⌉ / L · t
    later stage   ⌈L / S⌉ / L · t + time to receive activations
    iteration     first stage + (S − 1) · later stage
"""

import math
from collections.abc import Collection, Iterable
from typing import TypeVar

import msgspec

from twofold.errors import ConfigurationError, require
from twofold.hardware.specs import Machine, Model
from twofold.performance.base import PerformanceModel
from twofold.performance.coefficients import MeasuredPair
from twofold.performance.cost import DecodeCost, ModelAccuracy

P = TypeVar("P", bound=MeasuredPair)

_CAPPED, _CAP = "-pcap", 0.5  # the only power cap in Splitwise's profile, as a share of TDP


def check_tensor_parallel(machine: Machine, tensor_parallel: int) -> None:
    """Raise ConfigurationError if the machine has fewer than `tensor_parallel` accelerators."""
    if not 1 <= tensor_parallel <= machine.count:
        raise ConfigurationError(
            f"{machine.name} has {machine.count} accelerators, so tensor parallelism is 1 to {machine.count}, "
            f"not {tensor_parallel}"
        )


def check_expert_parallel(machine: Machine, tensor_parallel: int, expert_parallel: int, stages: int) -> None:
    """Raise ConfigurationError unless whole groups of instances that share experts fill a machine."""
    require(stages == 1, "experts are not spread over the instances of a pipeline: set pipeline_parallel 1")
    require(
        expert_parallel % tensor_parallel == 0 and machine.count % expert_parallel == 0,
        f"expert parallelism must be a multiple of tensor parallelism {tensor_parallel} that divides the "
        f"{machine.count} accelerators of a {machine.name}, not {expert_parallel}",
    )


def profile_name(machine: Machine) -> str:
    """Return the accelerator name of a machine as written in profiles, with the power cap if the machine has one."""
    name = machine.accelerator.name
    if machine.power_cap == 1.0 or name.endswith(_CAPPED):
        return name
    return name + _CAPPED if machine.power_cap == _CAP else f"{name} capped to {machine.power_cap:.0%}"


def find_pair(known: Iterable[P], model: Model, machine: Machine, tensor_parallel: int) -> P | None:
    """Return the item of `known` measured for this LLM, accelerator and tensor parallelism, or None."""
    wanted = (model.name, profile_name(machine), tensor_parallel)
    return next((one for one in known if (one.model, one.accelerator, one.tensor_parallel) == wanted), None)


def require_pair(known: Collection[P], model: Model, machine: Machine, tensor_parallel: int, kind: str) -> P:
    """Return the item of `known` measured for this LLM and accelerator. Raises ConfigurationError if there is none."""
    check_tensor_parallel(machine, tensor_parallel)
    entry = find_pair(known, model, machine, tensor_parallel)
    if entry is None:
        raise ConfigurationError(
            f"no {kind} of {model.name} on {profile_name(machine)} TP{tensor_parallel}, only of "
            f"{', '.join(one.pair for one in known)}: use `roofline` or `auto` for an estimate"
        )
    return entry


def instance_name(kind: str, model: Model, machine: Machine, tensor_parallel: int) -> str:
    """Return the display name of an instance, such as `fitted bloom-176b on dgx-h100 TP8`."""
    return f"{kind} {model.name} on {machine.name} TP{tensor_parallel}"


def memory_share(model: Model, machine: Machine, tensor_parallel: int, decode_s: float) -> float:
    """Return the fraction of memory bandwidth used to read the weights in a decode iteration of `decode_s` seconds."""
    bytes_read = model.weight_bytes * model.active_parameters / model.parameters
    return bytes_read / (decode_s * tensor_parallel * machine.accelerator.memory_bytes_per_s)


def resident_kv_bytes_per_token(model: Model, tensor_parallel: int) -> int:
    """Return the bytes of KV cache per token, summed over all accelerators of an instance."""
    # With more accelerators than KV heads, heads are replicated. Latent vectors are replicated on all accelerators.
    shards = model.kv_heads if model.kv_latent_dims is None else 1
    return -(-model.kv_bytes_per_token * max(tensor_parallel, shards) // shards)


class Pipeline(PerformanceModel):
    """Performance model of a pipeline-parallel instance that runs only one batch at a time.

    The time of an iteration is the sum of the times of all pipeline stages.
    """

    def __init__(
        self, name: str, error: ModelAccuracy, first: PerformanceModel, later: PerformanceModel, stages: int
    ) -> None:
        self.name, self.error = name, error
        self._first, self._later, self.stages = first, later, stages

    @property
    def first_stage(self) -> PerformanceModel:
        return self._first

    @property
    def later_stage(self) -> PerformanceModel:
        return self._later

    def prefill_s(self, tokens: int, squares: int) -> float:
        later_s = self._later.prefill_s(tokens, squares)
        return self._first.prefill_s(tokens, squares) + (self.stages - 1) * later_s

    def decode_cost(self, sequences: int) -> DecodeCost:
        first, later = self._first.decode_cost(sequences), self._later.decode_cost(sequences)
        rest = self.stages - 1
        return DecodeCost(first.base_s + rest * later.base_s, first.context_s + rest * later.context_s)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        later_s = self._later.mixed_s(tokens, squares, sequences, context)
        return self._first.mixed_s(tokens, squares, sequences, context) + (self.stages - 1) * later_s

    @property
    def idle_w(self) -> float:
        return self.stages * self._first.idle_w

    def prefill_w(self, tokens: int) -> float:
        return self._first.prefill_w(tokens) + (self.stages - 1) * self._first.idle_w  # the other stages idle

    def decode_w(self, sequences: int) -> float:
        return self._first.decode_w(sequences) + (self.stages - 1) * self._first.idle_w


class LayersStage(PerformanceModel):
    """Performance model of a pipeline stage with the fraction `share` of a model's layers."""

    def __init__(self, whole: PerformanceModel, share: float, token_s: float) -> None:
        self.name, self.error, self.power = whole.name, whole.error, whole
        # Receiving the activations of one token takes `token_s` seconds.
        self._whole, self._share, self._token_s = whole, share, token_s

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._share * self._whole.prefill_s(tokens, squares) + self._token_s * tokens

    def decode_cost(self, sequences: int) -> DecodeCost:
        cost = self._whole.decode_cost(sequences)
        base_s = self._share * cost.base_s + self._token_s * sequences
        return DecodeCost(base_s, self._share * cost.context_s)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        computed_s = self._share * self._whole.mixed_s(tokens, squares, sequences, context)
        return computed_s + self._token_s * (tokens + sequences)


def by_layers(
    whole: PerformanceModel,
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    pipeline_parallel: int,
    boundary_bytes_per_s: float | None = None,
) -> Pipeline:
    """Divide the layers of a performance model among pipeline stages. Raises ConfigurationError for too many stages."""
    # All stages are assumed to be as slow as the largest stage. Costs independent of layers (embeddings, sampling,
    # engine overhead) are divided in the same way.
    share = stage_layers(model, pipeline_parallel) / model.layers
    if boundary_bytes_per_s is None:
        boundary_bytes_per_s = boundary_bandwidth(
            machine, tensor_parallel, across=tensor_parallel * pipeline_parallel > machine.count
        )
    # Each accelerator of a stage sends its part of the activations, so the activations of a token are sent once.
    token_s = model.hidden_size * model.dtype_bytes / boundary_bytes_per_s
    error = msgspec.structs.replace(
        whole.error, basis=f"{whole.error.basis}; divided by layers among stages", estimated=True
    )
    name = f"{whole.name} PP{pipeline_parallel}"
    return Pipeline(name, error, LayersStage(whole, share, 0.0), LayersStage(whole, share, token_s), pipeline_parallel)


def boundary_bandwidth(machine: Machine, tensor_parallel: int, *, across: bool) -> float:
    """Return the bytes per second from one pipeline stage to the next."""
    if across:  # the stages are on different machines
        return machine.network_bytes_per_s * tensor_parallel / machine.count
    return machine.accelerator.interconnect_bytes_per_s * tensor_parallel


def stage_layers(model: Model, pipeline_parallel: int) -> int:
    """Return the number of layers in the largest stage. Raises ConfigurationError if a stage would have no layers."""
    if not 1 <= pipeline_parallel <= model.layers:
        raise ConfigurationError(
            f"{model.name} has {model.layers} layers, so pipeline parallelism is 1 to {model.layers}, "
            f"not {pipeline_parallel}"
        )
    return -(-model.layers // pipeline_parallel)


def kv_capacity_tokens(
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    utilization: float,  # share of accelerator memory for weights and KV
    kv_bytes_per_token: int | None = None,  # None: computed
    pipeline_parallel: int = 1,
    expert_parallel: int | None = None,  # accelerators that share the experts; None: those of the instance
) -> int:
    """Return an instance's KV capacity in tokens. Raises ConfigurationError if the weights leave no room for KV."""
    check_tensor_parallel(machine, tensor_parallel)
    require(0.0 < utilization <= 1.0, f"memory utilization must be above 0 and at most 1, not {utilization:g}")
    given = kv_bytes_per_token is None or kv_bytes_per_token >= 1
    require(given, f"KV bytes per token must be at least 1, not {kv_bytes_per_token}")
    layers = stage_layers(model, pipeline_parallel)  # the largest stage limits the capacity
    memory = tensor_parallel * machine.accelerator.memory_bytes
    weights = _share(_weight_bytes(model, tensor_parallel, expert_parallel), layers, model)
    token = _share(kv_bytes_per_token or resident_kv_bytes_per_token(model, tensor_parallel), layers, model)
    tokens = (int(memory * utilization) - weights) // token
    if tokens < 1:
        stage = f"a stage of {layers} layers of {model.name}" if pipeline_parallel > 1 else model.name
        have = f"{tensor_parallel}x {machine.accelerator.name} have {memory / 1e9:,.0f} GB"
        may = f", of which {utilization:.0%} may be used" if utilization < 1.0 else ""
        raise ConfigurationError(
            f"{stage} needs {weights / 1e9:,.0f} GB for weights plus KV cache, but {have}{may}: "
            "use more accelerators per instance or larger ones"
        )
    return tokens


def _weight_bytes(model: Model, tensor_parallel: int, expert_parallel: int | None) -> int:
    """Return the bytes of weights on the accelerators of an instance."""
    if expert_parallel is None:
        return model.weight_bytes
    experts = model.weight_bytes * model.expert_parameters / model.parameters
    return math.ceil(model.weight_bytes - experts * (1.0 - tensor_parallel / expert_parallel))


def _share(size: int, layers: int, model: Model) -> int:
    """Return the bytes of `layers` layers, if the whole model has `size` bytes."""
    return -(-size * layers // model.layers)
