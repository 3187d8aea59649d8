"""Devices of workers: the GPU that each rank uses, and the share of its memory for KV."""

from collections.abc import Mapping
from itertools import cycle
from typing import Final, NamedTuple

import torch

from twofold.errors import ConfigurationError, require

DEFAULT_UTILIZATION: Final = 0.9
# GPU memory of a process outside torch's allocator: the CUDA context, kernels, and workspaces of libraries.
CONTEXT_BYTES: Final = 1 << 30


class DeviceMemory(NamedTuple):
    """Memory of a GPU in bytes: all, free, and torch's, with a worker's weights and at its peak in a batch."""

    total: int
    free: int
    loaded: int
    peak: int

    def for_kv(self, share: float) -> int:
        """Return the bytes for a KV cache if the worker may use this share of the GPU's memory."""
        free = self.free - (self.peak - self.loaded)  # other processes may use the GPU, too
        return max(0, min(int(self.total * share) - self.peak - CONTEXT_BYTES, free))


def choose_device(name: str) -> str:
    """Return the device `name`, or for `auto` the best there is. Raises ConfigurationError unless torch has it."""
    # Must not initialize CUDA, which survives no fork.
    if name == "auto":
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
    """Return the device of each rank of each worker. With `cuda`, they take the GPUs in turn.

    Raises ConfigurationError if a worker has more ranks than there are GPUs.
    """
    places = [f"cuda:{index}" for index in range(gpus)] if device == "cuda" else [device]
    most, turns = max(ranks.values(), default=1), cycle(places)
    why = f"--device {device}: each rank of a worker needs its own GPU, so {most}, and there are {len(places)}"
    require(device == "cpu" or most <= len(places), why)
    return {worker: tuple(next(turns) for _ in range(count)) for worker, count in ranks.items()}
