"""Transport `nixl`: one-sided writes and reads over what NIXL's UCX finds: RDMA, TCP, GPU to GPU, one host's memory."""

import torch

from twofold.curve.network import Network
from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import KvPool
from twofold.transport.address import Address
from twofold.transport.base import SCRATCH_BYTES, Connection, MemoryDescriptor, check_layout
from twofold.transport.memory import SharedMemory
from twofold.transport.nixl_agent import NixlAgent
from twofold.transport.one_sided import LIFE_BYTES, CacheMemory, OneSidedConnection
from twofold.transport.pooled import PooledTransport
from twofold.transport.tensors import as_tensor

ALIGNMENT = 64


class NixlAddress(Address, frozen=True, tag=True):
    """What `MemoryDescriptor.address` holds: the agent's metadata and where its memory begins.

    `device` is the GPU it lies on, None for the host.
    """

    transport = "nixl"

    metadata: bytes
    base: int
    device: int | None


def life_offset(layout: KvLayout, num_blocks: int) -> int:
    """Where the life word lies in a cache's memory: the first place behind the pool that is aligned."""
    return -(-layout.pool_bytes(num_blocks) // ALIGNMENT) * ALIGNMENT


def cache_memory(layout: KvLayout, num_blocks: int, base: int, device: int | None) -> CacheMemory:
    """The pool, the life word and the scratch memory, one behind the other."""
    life = base + life_offset(layout, num_blocks)
    return CacheMemory(layout, num_blocks, base=base, life=life, scratch=life + LIFE_BYTES, device=device)


class NixlTransport(PooledTransport):
    """The local cache, registered with NIXL once and as a whole.

    It lies where the engine computes, so nothing is staged. The agent is named after the instance and its epoch:
    metadata, and the connections made from it, belong to one life. What is written under an earlier one fails at the
    connection, because the process that it was made to is gone, or at the life word, when another answers there.
    """

    lingers = True  # bytes of a process that has ended may wait in the network, and UCX puts them into place

    def __init__(
        self,
        instance: str,
        epoch: int,
        layout: KvLayout,
        num_blocks: int,
        device: str,
        _network: Network | None = None,
    ) -> None:
        self._agent = NixlAgent(f"{instance}@{epoch}")
        life = life_offset(layout, num_blocks)
        nbytes = life + LIFE_BYTES + SCRATCH_BYTES
        where = torch.device(device)
        on_cpu = where.type == "cpu"
        if on_cpu:
            self._shared = SharedMemory.create(
                instance, nbytes
            )  # taken from the machine now, not when it is full
            memory = as_tensor(self._shared)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=where)
        self.engine_pool = self.landing_pool = KvPool(layout, num_blocks, memory)
        self._cache = cache_memory(
            layout, num_blocks, memory.data_ptr(), None if on_cpu else where.index or 0
        )
        self._life_word = memory[life : life + 16].view(torch.int64)
        self._life_word[0] = epoch
        self._agent.register(memory.data_ptr(), nbytes, self._cache.device)
        address = NixlAddress(self._agent.metadata(), memory.data_ptr(), self._cache.device)
        self.descriptor = MemoryDescriptor(
            instance=instance, epoch=epoch, address=address.encode(), num_blocks=num_blocks, layout=layout
        )

    def connect(self, peer: MemoryDescriptor) -> Connection:
        check_layout(self.descriptor, peer)
        address = NixlAddress.decode(peer.address)
        remote = cache_memory(peer.layout, peer.num_blocks, address.base, address.device)
        name = self._agent.meet(address.metadata)
        connection = OneSidedConnection(self._agent, name, self._cache, remote)
        connection.greet(peer.epoch, self._life_word)
        return connection

    def close(self) -> None:
        """Its memory goes with the process, and so do the connections of peers."""
