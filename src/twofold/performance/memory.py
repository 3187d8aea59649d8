"""What of an instance's memory is left for KV cache."""

from twofold.errors import ConfigurationError
from twofold.hardware.machine import Machine
from twofold.hardware.model import Model
from twofold.performance.instance import check_tensor_parallel, resident_kv_bytes_per_token


def kv_capacity_tokens(
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    utilization: float,
    kv_bytes_per_token: int | None = None,
) -> int:
    """How many tokens of KV cache an instance holds beside its weights.

    `utilization` is the share of accelerator memory that weights and KV may fill; `kv_bytes_per_token`
    overrides what the model and its sharding need. Raises ConfigurationError where the weights do not fit.
    """
    check_tensor_parallel(machine, tensor_parallel)
    if not 0.0 < utilization <= 1.0:
        raise ConfigurationError(
            f"memory utilization {utilization:g} is no share: give more than 0, at most 1"
        )
    if kv_bytes_per_token is not None and kv_bytes_per_token < 1:
        raise ConfigurationError(f"KV bytes per token must be at least 1, not {kv_bytes_per_token}")
    memory = tensor_parallel * machine.accelerator.memory_bytes
    free = int(memory * utilization) - model.weight_bytes
    tokens = free // (kv_bytes_per_token or resident_kv_bytes_per_token(model, tensor_parallel))
    if tokens < 1:
        raise ConfigurationError(_too_large(model, machine, tensor_parallel, utilization, memory))
    return tokens


def _too_large(model: Model, machine: Machine, tensor_parallel: int, utilization: float, memory: int) -> str:
    have = f"{tensor_parallel}x {machine.accelerator.name} have {memory / 1e9:,.0f} GB"
    share = f", of which {utilization:.0%} may be used" if utilization < 1.0 else ""
    return (
        f"{model.name} needs {model.weight_bytes / 1e9:,.0f} GB for its weights and some for KV cache, and {have}"
        f"{share}: use more accelerators per instance or larger ones"
    )
