"""Devices of workers: the GPU that each rank uses, and the share of its memory for KV."""

from collections.abc import Mapping
from itertools import cycle
from typing import Final, NamedTuple

import torch

from twofold.errors import ConfigurationError, require

AUTO: Final = "auto"
DEFAULT_UTILIZATION: Final = 0.9
# GPU memory of a process outside torch's allocator: the CUDA context, kernels, and workspaces of libraries.
CONTEXT_BYTES: Final = 1 << 30


class DeviceMemory(NamedTuple):
    """Memory of a GPU in bytes, with a worker's weights on it. Torch's own is `loaded`, and `peak` in a batch."""

    total: int
    free: int
    loaded: int
    peak: int


class GpuBudget(NamedTuple):
    """Share of a GPU's memory for all ranks on it, and the most bytes for the KV cache of one of them."""

    utilization: float
    most_bytes: int

    def kv_cache_bytes(self, memory: DeviceMemory, sharing: int) -> int:
        """Return the bytes for the KV cache of one of `sharing` ranks on a GPU."""
        share = int(memory.total * self.utilization) // sharing - memory.peak - CONTEXT_BYTES
        free = memory.free - (memory.peak - memory.loaded)  # other processes may use the GPU, too
        return max(0, min(share, free, self.most_bytes))


def choose_device(name: str) -> str:
    """Return the device `name`; for `auto`, cuda if torch finds a GPU, else cpu.

    Raises ConfigurationError unless torch supports it.
    """
    # Must not initialize CUDA, which survives no fork.
    if name == AUTO:
        return "cuda" if torch.version.cuda is not None and torch.cuda.device_count() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigurationError(f"--device {name!r} is unknown: choose auto, cpu, cuda or cuda:N") from error
    require(kind in {"cpu", "cuda"}, f"--device {name!r} is not supported: choose auto, cpu, cuda or cuda:N")
    if kind == "cuda" and torch.version.cuda is None:
        raise ConfigurationError(f"--device {name!r} needs torch with CUDA, but {torch.__version__} has none")
    return name


def place_ranks(device: str, ranks: Mapping[str, int], gpus: int) -> dict[str, tuple[str, ...]]:
    """Return the device of each rank of each worker, given their numbers of ranks.

    With `cuda`, the ranks of all workers take the GPUs in turn. Raises ConfigurationError if a worker has more ranks
    than there are GPUs.
    """
    if device != "cuda":
        return {worker: (device,) * count for worker, count in ranks.items()}
    most = max(ranks.values(), default=1)
    require(most <= gpus, f"--device cuda: a worker needs a GPU for each rank, so {most}, and torch finds {gpus}")
    turns = cycle(range(gpus))
    return {worker: tuple(f"cuda:{next(turns)}" for _ in range(count)) for worker, count in ranks.items()}
