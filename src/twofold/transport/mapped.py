"""The KV cache of a peer's process on this host, mapped into ours."""

import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool, copy_blocks
from twofold.engine.torch.streams import Pinned
from twofold.transport.base import SCRATCH_BYTES
from twofold.transport.memory import SharedMemory
from twofold.transport.tensors import as_tensor

# Scratch memory as blocks, so that a probe does what a write does.
_SCRATCH_LAYOUT = KvLayout((LayerShape(1, 8 << 10, 8 << 10),), block_size=1, dtype="uint8", itemsize=1)


class MappedPool:
    """`pool` is theirs. It stays there after their end, where nobody looks at it."""

    def __init__(self, address: str, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """`device` is what copies there; raises ConfigurationError where there is no such memory."""
        nbytes = layout.pool_bytes(num_blocks)
        self._memory = SharedMemory.open(address, nbytes + SCRATCH_BYTES)
        self.pool = KvPool(layout, num_blocks, as_tensor(self._memory))
        self._pinned = Pinned(self.pool.memory, device)
        self._scratch = _scratch_pool(as_tensor(self._memory)[nbytes:])
        self._own_scratch = _scratch_pool(None)

    def probe(self, nbytes: int) -> None:
        """Write `nbytes` into their scratch memory."""
        blocks = range(-(-nbytes // _SCRATCH_LAYOUT.bytes_per_block))
        copy_blocks(self._own_scratch, 0, blocks, self._scratch, blocks)

    def close(self) -> None:
        self._pinned.close()
        self._memory.close()


def _scratch_pool(memory: torch.Tensor | None) -> KvPool:
    return KvPool(_SCRATCH_LAYOUT, SCRATCH_BYTES // _SCRATCH_LAYOUT.bytes_per_block, memory)
