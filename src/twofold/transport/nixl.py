"""Transport `nixl`: one-sided writes and reads over what NIXL's UCX finds: RDMA, TCP, GPU to GPU, one host's memory."""

import base64
import math
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from twofold.curve.network import Network
from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import KvPool, block_runs
from twofold.errors import ConfigurationError, InstanceLostError, StaleEpochError, TwofoldError
from twofold.transport.base import SCRATCH_BYTES, Connection, MemoryDescriptor, check_layout, moved_bytes
from twofold.transport.memory import SharedMemory
from twofold.transport.nixl_agent import NixlAgent, Pieces
from twofold.transport.pooled import PooledTransport
from twofold.transport.tensors import as_tensor

LIFE_BYTES = 64  # behind the pool: the epoch as 8 bytes, and room for a peer's on its way here
ALIGNMENT = 64
CONNECT_S = 10.0


class NixlAddress(msgspec.Struct, frozen=True):
    """What `MemoryDescriptor.address` holds: the agent's metadata and where its memory begins.

    `device` is the GPU it lies on, None for the host.
    """

    metadata: bytes
    base: int
    device: int | None

    def encode(self) -> str:
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, address: str) -> "NixlAddress":
        """Raises ConfigurationError for what another transport wrote."""
        try:
            return msgspec.msgpack.decode(base64.b64decode(address, validate=True), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigurationError(
                "a peer's address is not one of NIXL's: both need --transport nixl"
            ) from error


class CacheMemory:
    """Where each layer's keys and values lie in a cache's memory, and its life word and scratch behind them."""

    def __init__(self, layout: KvLayout, num_blocks: int, base: int, device: int | None) -> None:
        self.device = device
        self._parts: list[tuple[int, int]] = []  # (address, bytes per block), keys and values in turn
        address = base
        for layer in layout.layers:
            for dim in (layer.key_dim, layer.value_dim):
                row = layout.block_size * layer.kv_heads * dim * layout.itemsize
                self._parts.append((address, row))
                address += num_blocks * row
        self.life = base + life_offset(layout, num_blocks)
        self.scratch = self.life + LIFE_BYTES

    def pieces(self, layers: range, starts: Sequence[int], counts: Sequence[int]) -> Pieces:
        """A row (address, bytes, device) for the keys and for the values of each run of blocks in each layer."""
        parts = np.array(self._parts[2 * layers.start : 2 * layers.stop], dtype=np.uint64)
        rows = np.empty((len(parts), len(starts), 3), dtype=np.uint64)
        rows[:, :, 0] = parts[:, :1] + parts[:, 1:] * np.array(starts, dtype=np.uint64)
        rows[:, :, 1] = parts[:, 1:] * np.array(counts, dtype=np.uint64)
        rows[:, :, 2] = self.device or 0
        return rows.reshape(-1, 3)

    def piece(self, address: int, nbytes: int) -> Pieces:
        return np.array([(address, nbytes, self.device or 0)], dtype=np.uint64)


def life_offset(layout: KvLayout, num_blocks: int) -> int:
    """Where the life word lies in a cache's memory: the first place behind the pool that is aligned."""
    return -(-layout.pool_bytes(num_blocks) // ALIGNMENT) * ALIGNMENT


class NixlConnection:
    """One life of a peer. What is still to be moved when that ends, or `close` is called, is not moved."""

    def __init__(self, agent: NixlAgent, pool: KvPool, local: CacheMemory, peer: MemoryDescriptor) -> None:
        address = NixlAddress.decode(peer.address)
        self._agent, self._pool, self._local = agent, pool, local
        self._remote = CacheMemory(peer.layout, peer.num_blocks, address.base, address.device)
        self._closed = False
        self._name = agent.meet(address.metadata)

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        if self._local.device is not None:
            torch.cuda.current_stream(self._local.device).synchronize()  # what is sent must be computed
        sources, targets, counts = _transposed(source_blocks, target_blocks)
        self._move(
            "WRITE", self._local.pieces(layers, sources, counts), self._remote.pieces(layers, targets, counts)
        )
        return moved_bytes(self._pool.layout, layers, len(source_blocks))

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        sources, targets, counts = _transposed(source_blocks, target_blocks)
        self._move(
            "READ", self._local.pieces(layers, targets, counts), self._remote.pieces(layers, sources, counts)
        )
        return moved_bytes(self._pool.layout, layers, len(source_blocks))

    def probe(self, nbytes: int) -> None:
        local, remote = self._local, self._remote
        self._move("WRITE", local.piece(local.scratch, nbytes), remote.piece(remote.scratch, nbytes))

    def greet(self, epoch: int, life_word: torch.Tensor) -> None:
        """Read the peer's life word into ours: raises StaleEpochError when another life answers at its address."""
        local, remote = self._local, self._remote
        deadline = time.monotonic() + CONNECT_S
        answer = local.piece(local.life + 8, 8)
        self._move("READ", answer, remote.piece(remote.life, 8), deadline)
        if (found := int(life_word[1])) != epoch:
            raise StaleEpochError(
                f"epoch {epoch} of {self._name} is over: epoch {found} answers in its place"
            )

    def close(self) -> None:
        self._closed = True
        self._agent.forget(self._name)

    def _move(self, operation: str, local: Pieces, remote: Pieces, deadline: float = math.inf) -> None:
        if self._closed:
            raise InstanceLostError(f"{self._name} is gone")
        self._agent.move(
            operation,
            local,
            self._local.device,
            remote,
            self._remote.device,
            self._name,
            lambda: self._closed or time.monotonic() > deadline,
        )


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
        self._cache = CacheMemory(layout, num_blocks, memory.data_ptr(), None if on_cpu else where.index or 0)
        self._life_word = memory[life : life + 16].view(torch.int64)
        self._life_word[0] = epoch
        self._agent.register(memory.data_ptr(), nbytes, self._cache.device)
        address = NixlAddress(self._agent.metadata(), memory.data_ptr(), self._cache.device)
        self.descriptor = MemoryDescriptor(
            instance=instance, epoch=epoch, address=address.encode(), num_blocks=num_blocks, layout=layout
        )

    def connect(self, peer: MemoryDescriptor) -> Connection:
        check_layout(self.descriptor, peer)
        connection = NixlConnection(self._agent, self.engine_pool, self._cache, peer)
        try:
            connection.greet(peer.epoch, self._life_word)
        except TwofoldError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Its memory goes with the process, and so do the connections of peers."""


def _transposed(
    source_blocks: Sequence[int], target_blocks: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Runs of blocks that are neighbours on both sides, as their first sources, first targets and lengths."""
    runs = block_runs(source_blocks, target_blocks)
    return [run[0] for run in runs], [run[1] for run in runs], [run[2] for run in runs]
