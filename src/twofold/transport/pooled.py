"""Base of transports whose KV caches are torch tensors."""

import zlib
from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from twofold.engine.torch.pool import KvPool
from twofold.transport.base import KvCacheSpec, Transport
from twofold.transport.memory import SharedMemory
from twofold.transport.registry import TRANSPORTS, check_transport


def as_tensor(memory: SharedMemory) -> torch.Tensor:
    """Return a uint8 tensor that shares the given memory."""
    return torch.frombuffer(memory.view(), dtype=torch.uint8)


class PooledTransport(Transport):
    """Transport that allocates the KV cache. The engine uses `engine_pool`, peers `landing_pool` (or the same)."""

    engine_pool: KvPool
    landing_pool: KvPool

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        pool = self.landing_pool if landed else self.engine_pool
        with pool.copying():
            for layer in layers:
                for part in pool.block_rows(layer):
                    rows = part.index_select(0, torch.tensor(blocks, device=part.device)).cpu().numpy()
                    for place, row in enumerate(rows):
                        sums[place] = zlib.crc32(row, sums[place])


MakeTransport = Callable[[KvCacheSpec], PooledTransport]


def load_transport(name: str) -> MakeTransport:
    """Return the constructor of a transport. Raises ConfigurationError if it is unknown or not installed."""
    check_transport(name)
    transport: MakeTransport = getattr(import_module(f"twofold.transport.{name}"), TRANSPORTS[name].name)
    return transport
