"""An instance as the performance models name and check it: a model on part of a machine."""

from twofold.errors import ConfigurationError
from twofold.hardware.machine import Machine
from twofold.hardware.model import Model

_CAPPED, _CAP = "-pcap", 0.5  # the one cap that Splitwise's profile has, and its share of TDP


def check_tensor_parallel(machine: Machine, tensor_parallel: int) -> None:
    """Raise ConfigurationError where the machine has not that many accelerators."""
    if not 1 <= tensor_parallel <= machine.count:
        raise ConfigurationError(
            f"{machine.name} has {machine.count} accelerators, so tensor parallelism is 1 to {machine.count}, "
            f"not {tensor_parallel}"
        )


def profile_name(machine: Machine) -> str:
    """What profiles call this machine's accelerators: those under a power cap are measured apart."""
    name = machine.accelerator.name
    if machine.power_cap == 1.0 or name.endswith(_CAPPED):
        return name
    return name + _CAPPED if machine.power_cap == _CAP else f"{name} capped to {machine.power_cap:.0%}"


def instance_name(kind: str, model: Model, machine: Machine, tensor_parallel: int) -> str:
    """For people: `fitted bloom-176b on dgx-h100 TP8`."""
    return f"{kind} {model.name} on {machine.name} TP{tensor_parallel}"


def memory_share(model: Model, machine: Machine, tensor_parallel: int, decode_s: float) -> float:
    """The share of memory bandwidth that a decode of one sequence uses: it reads the active weights once."""
    bytes_read = model.weight_bytes * model.active_parameters / model.parameters
    return bytes_read / (decode_s * tensor_parallel * machine.accelerator.memory_bytes_per_s)


def resident_kv_bytes_per_token(model: Model, tensor_parallel: int) -> int:
    """Bytes of KV cache of one token over all accelerators of an instance.

    Keys and values are split by KV head. Where there are more accelerators than KV heads, each head lies on
    several of them; the compressed vector of latent attention cannot be split, so each holds it whole.
    """
    shards = model.kv_heads if model.kv_latent_dims is None else 1
    return -(-model.kv_bytes_per_token * max(tensor_parallel, shards) // shards)
