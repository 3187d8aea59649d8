"""A NIXL agent with the UCX backend, as far as a transport needs one.

It goes past the `nixl_agent` class of the nixl package to the bindings beneath: that class fixes the delay of the
progress thread at 0, which makes it poll without a pause and take a core away from the engine. A progress thread
there must be: over TCP it is the target's side that puts the bytes into place. With a delay it sleeps until the
network wakes it.

Transport `nixl`: one-sided writes and reads over what NIXL's UCX finds: RDMA, TCP, GPU to GPU, one host's memory.
"""

import os
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import KvPool
from twofold.errors import ConfigurationError, InstanceLostError
from twofold.security.network import HostNetwork
from twofold.transport.base import SCRATCH_BYTES, Connection, MemoryDescriptor, TransportAddress, check_layout
from twofold.transport.memory import SharedMemory
from twofold.transport.one_sided import LIFE_BYTES, CacheMemory, OneSidedConnection, Operation, Pieces, pause
from twofold.transport.pooled import PooledTransport, as_tensor
from twofold.transport.registry import TRANSPORTS

PROGRESS_DELAY_US = 5000  # how often the progress thread looks even where nothing wakes it
PACKAGES = TRANSPORTS["nixl"].packages  # one API; which is installed depends on the CUDA beside it
BACKEND = "UCX"


class MemoryKind(Protocol):
    """Where registered memory lies, in the terms of the bindings."""


class NixlAgent:
    """Registers memory, knows peers by their metadata, and moves pieces between theirs and ours.

    Safe to use from several threads; each transfer waits in the thread that asked for it.
    """

    def __init__(self, name: str) -> None:
        bindings = self._bindings = _load_bindings()
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = bindings.nixlAgent(name, config)
            self._agent.createBackend(BACKEND, self._agent.getPluginParams(BACKEND)[0])
        except Exception as error:  # the bindings have no common base for theirs
            raise ConfigurationError(f"NIXL cannot start its {BACKEND} backend: {error}") from error
        self._unreleased: list[int] = []

    def register(self, address: int, nbytes: int, device: int | None) -> None:
        """Make this memory (of a GPU, or of the host where `device` is None) reachable; raises ConfigurationError."""
        pieces = self._bindings.nixlRegDList(self._kind(device), [(address, nbytes, device or 0, "")])
        try:
            self._agent.registerMem(pieces, [])
        except Exception as error:  # as above
            raise ConfigurationError(
                f"NIXL cannot register {nbytes / 2**20:,.0f} MiB of memory: {error}"
            ) from error

    def metadata(self) -> bytes:
        """What a peer must know of this agent and the memory it registered."""
        return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        """Learn of a peer; returns its agent's name. Raises ConfigurationError for what is no metadata."""
        try:
            return bytes(self._agent.loadRemoteMD(metadata)).decode()
        except Exception as error:  # as above
            raise ConfigurationError(f"NIXL cannot use a peer's metadata: {error}") from error

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer. A peer that has ended already is no mistake."""
        try:
            self._agent.invalidateRemoteMD(peer)
        except Exception as error:  # as above
            if not isinstance(error, self._bindings.nixlNotFoundError):
                raise

    def move(
        self, operation: Operation, local: Pieces, remote: Pieces, peer: str, given_up: Callable[[], bool]
    ) -> None:
        """As `Mover.move` is to."""
        bindings, agent, handle = self._bindings, self._agent, None
        try:
            handle = agent.createXferReq(
                getattr(bindings, f"NIXL_{operation}"),
                bindings.nixlXferDList(self._kind(local.device), _with_device(local)),
                bindings.nixlXferDList(self._kind(remote.device), _with_device(remote)),
                peer,
                b"",
                [],
            )
            status = self._wait(handle, agent.postXferReq(handle, b""), given_up)
        except Exception as error:  # as above
            raise InstanceLostError(f"NIXL cannot reach {peer}: {error}") from error
        finally:
            if handle is not None:
                self._release(handle)
        if status != bindings.NIXL_SUCCESS:
            raise InstanceLostError(f"NIXL cannot reach {peer}: {status}")

    def _wait(self, handle: int, status: object, given_up: Callable[[], bool]) -> object:
        """The status of a transfer that is over, or was given up."""
        began, checks = time.perf_counter(), 0
        while status == self._bindings.NIXL_IN_PROG and not given_up():
            pause(checks, time.perf_counter() - began)
            checks += 1
            status = self._agent.getXferStatus(handle)
        return status

    def _release(self, handle: int) -> None:
        """A transfer that cannot be cancelled at once is released when a later one is."""
        waiting, self._unreleased = [*self._unreleased, handle], []
        for each in waiting:
            try:
                self._agent.releaseXferReq(each)
            except Exception:  # noqa: BLE001  (as above)
                self._unreleased.append(each)

    def _kind(self, device: int | None) -> MemoryKind:
        bindings = self._bindings
        kind: MemoryKind = bindings.DRAM_SEG if device is None else bindings.VRAM_SEG
        return kind


def _with_device(pieces: Pieces) -> npt.NDArray[np.uint64]:
    """Rows of (address, bytes, device), as the bindings want them."""
    devices = np.full(len(pieces.rows), pieces.device or 0, dtype=np.uint64)
    return np.column_stack((pieces.rows, devices))


def _load_bindings() -> Any:  # noqa: ANN401  (a module of compiled code without types)
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong is raised, and told by us
    package = next(name for name in PACKAGES if find_spec(name))
    return import_module(f"{package}._bindings")


ALIGNMENT = 64


class NixlAddress(TransportAddress, frozen=True, tag=True):
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

    writes_outlive_lease = (
        True  # bytes of a process that has ended may wait in the network, and UCX puts them into place
    )

    def __init__(
        self,
        instance: str,
        epoch: int,
        layout: KvLayout,
        num_blocks: int,
        device: str,
        _network: HostNetwork | None = None,
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
