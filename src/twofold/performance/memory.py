"""What of an instance's memory is left for KV cache."""

from twofold.errors import ConfigurationError
from twofold.hardware.machine import Machine
from twofold.hardware.model import Model
from twofold.performance.instance import check_tensor_parallel, resident_kv_bytes_per_token
from twofold.performance.pipeline import stage_layers


def kv_capacity_tokens(
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    utilization: float,
    kv_bytes_per_token: int | None = None,
    pipeline_parallel: int = 1,
) -> int:
    """How many tokens of KV cache an instance holds beside its weights.

    `utilization` is the share of accelerator memory that weights and KV may fill; `kv_bytes_per_token`
    overrides what the model and its sharding need. Of a pipeline it is what its largest stage holds, which has that
    share of the weights, as if the embeddings were spread over the layers, and of the KV of each token. Raises
    ConfigurationError where the weights do not fit.
    """
    check_tensor_parallel(machine, tensor_parallel)
    if not 0.0 < utilization <= 1.0:
        raise ConfigurationError(
            f"memory utilization {utilization:g} is no share: give more than 0, at most 1"
        )
    if kv_bytes_per_token is not None and kv_bytes_per_token < 1:
        raise ConfigurationError(f"KV bytes per token must be at least 1, not {kv_bytes_per_token}")
    layers = stage_layers(model, pipeline_parallel)
    memory = tensor_parallel * machine.accelerator.memory_bytes
    weights = _share(model.weight_bytes, layers, model)
    token = _share(kv_bytes_per_token or resident_kv_bytes_per_token(model, tensor_parallel), layers, model)
    tokens = (int(memory * utilization) - weights) // token
    if tokens < 1:
        stage = f"a stage of {layers} layers of {model.name}" if pipeline_parallel > 1 else model.name
        have = f"{tensor_parallel}x {machine.accelerator.name} have {memory / 1e9:,.0f} GB"
        may = f", of which {utilization:.0%} may be used" if utilization < 1.0 else ""
        raise ConfigurationError(
            f"{stage} needs {weights / 1e9:,.0f} GB for its weights and some for KV cache, and {have}{may}: "
            "use more accelerators per instance or larger ones"
        )
    return tokens


def _share(size: int, layers: int, model: Model) -> int:
    """What of `size` goes to so many of the model's layers."""
    return -(-size * layers // model.layers)
