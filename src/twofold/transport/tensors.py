"""Shared memory as torch sees it."""

import torch

from twofold.transport.memory import SharedMemory


def as_tensor(memory: SharedMemory) -> torch.Tensor:
    """All of it as a tensor of bytes [nbytes], writable."""
    return torch.frombuffer(memory.view(), dtype=torch.uint8)
