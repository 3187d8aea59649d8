"""Transport `nixl`: one-sided writes and reads over NIXL's UCX backend (RDMA, TCP, GPU to GPU, shared memory).

The transport uses NIXL's low-level bindings, because NIXL's own agent class polls without a pause.
"""

import os
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import KvPool
from twofold.errors import ConfigurationError, InstanceLostError
from twofold.transport.base import SCRATCH_BYTES, Connection, KvCacheSpec, MemoryDescriptor, TransportAddress
from twofold.transport.memory import SharedMemory
from twofold.transport.one_sided import LIFE_BYTES, CacheMemory, OneSidedConnection, Operation, Pieces, pause
from twofold.transport.pooled import PooledTransport, as_tensor
from twofold.transport.registry import TRANSPORTS

PROGRESS_DELAY_US = 5000  # longest sleep of the progress thread, which the network wakes
PACKAGES = TRANSPORTS["nixl"].packages  # the same API for different CUDA versions
BACKEND = "UCX"


class NixlAgent:
    """Thread-safe interface to NIXL. Peers are addressed by agent name."""

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
        except Exception as error:  # the bindings' exceptions have no common base class
            raise ConfigurationError(f"cannot start NIXL's {BACKEND} backend: {error}") from error
        self._unreleased: list[int] = []

    def register(self, address: int, nbytes: int, device: int | None) -> None:
        """Let peers access memory of GPU `device`, or of the host if None. Raises ConfigurationError on failure."""
        pieces = self._bindings.nixlRegDList(self._kind(device), [(address, nbytes, device or 0, "")])
        try:
            self._agent.registerMem(pieces, [])
        except Exception as error:  # as above
            raise ConfigurationError(f"NIXL cannot register {nbytes / 2**20:,.0f} MiB of memory: {error}") from error

    def metadata(self) -> bytes:
        """Return the metadata of this agent, which peers load with `meet`."""
        return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        """Load a peer's metadata; return the peer's agent name. Raises ConfigurationError for invalid metadata."""
        try:
            return bytes(self._agent.loadRemoteMD(metadata)).decode()
        except Exception as error:  # as above
            raise ConfigurationError(f"NIXL refused a peer's metadata: {error}") from error

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer, if it exists."""
        try:
            self._agent.invalidateRemoteMD(peer)
        except Exception as error:  # as above
            if not isinstance(error, self._bindings.nixlNotFoundError):
                raise

    def move(
        self, operation: Operation, local: Pieces, remote: Pieces, peer: str, cancelled: Callable[[], bool]
    ) -> None:
        """Copy memory ranges to or from a peer (see `TransferEngine.move`)."""
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
            status = self._wait(handle, agent.postXferReq(handle, b""), cancelled)
        except Exception as error:  # as above
            raise InstanceLostError(f"NIXL cannot reach {peer}: {error}") from error
        finally:
            if handle is not None:
                self._release(handle)
        if status != bindings.NIXL_SUCCESS:
            raise InstanceLostError(f"NIXL cannot reach {peer}: {status}")

    def _wait(self, handle: int, status: object, cancelled: Callable[[], bool]) -> object:
        began, checks = time.perf_counter(), 0
        while status == self._bindings.NIXL_IN_PROG and not cancelled():
            pause(checks, time.perf_counter() - began)
            checks += 1
            status = self._agent.getXferStatus(handle)
        return status

    def _release(self, handle: int) -> None:
        # With earlier releases that failed.
        waiting, self._unreleased = [*self._unreleased, handle], []
        for each in waiting:
            try:
                self._agent.releaseXferReq(each)
            except Exception:  # noqa: BLE001  (as above)
                self._unreleased.append(each)

    def _kind(self, device: int | None) -> object:
        return self._bindings.DRAM_SEG if device is None else self._bindings.VRAM_SEG


def _with_device(pieces: Pieces) -> npt.NDArray[np.uint64]:
    devices = np.full(len(pieces.rows), pieces.device or 0, dtype=np.uint64)
    return np.column_stack((pieces.rows, devices))


def _load_bindings() -> Any:  # noqa: ANN401  (untyped compiled code)
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are raised and reported by Twofold
    package = next(name for name in PACKAGES if find_spec(name))
    return import_module(f"{package}._bindings")


ALIGNMENT = 64


class NixlAddress(TransportAddress, frozen=True, tag=True):
    """Address of a KV cache in the memory of a NIXL agent."""

    transport = "nixl"

    metadata: bytes
    base: int  # first byte of the cache
    device: int | None  # GPU, or None for host memory


def life_offset(layout: KvLayout, num_blocks: int) -> int:
    """Return the byte offset of an instance's epoch number in the memory of the KV cache.

    The epoch number comes after the KV blocks and changes when the instance restarts.
    """
    return -(-layout.pool_bytes(num_blocks) // ALIGNMENT) * ALIGNMENT


def cache_memory(layout: KvLayout, num_blocks: int, base: int, device: int | None) -> CacheMemory:
    """Return the memory addresses of an instance's KV blocks, epoch number and measurement buffer.

    The three parts lie in this order in one memory region that starts at address `base`. The epoch number
    changes when the instance restarts. The buffer is for link measurements.
    """
    life = base + life_offset(layout, num_blocks)
    return CacheMemory(layout, num_blocks, base=base, life=life, scratch=life + LIFE_BYTES, device=device)


class NixlTransport(PooledTransport):
    """Transport through which peers read and write the engine's own KV cache directly with NIXL.

    If the instance restarts, writes from peers that are still connected to the old process fail.
    """

    writes_outlive_lease = True  # data of an ended process may still be in the network

    def __init__(self, spec: KvCacheSpec) -> None:
        layout, num_blocks = spec.layout, spec.num_blocks
        self._agent = NixlAgent(f"{spec.instance}@{spec.epoch}")
        life = life_offset(layout, num_blocks)
        nbytes = life + LIFE_BYTES + SCRATCH_BYTES
        where = torch.device(spec.device)
        on_cpu = where.type == "cpu"
        if on_cpu:
            self._shared = SharedMemory.create(spec.instance, nbytes)  # allocated at start
            memory = as_tensor(self._shared)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=where)
        self.engine_pool = self.landing_pool = KvPool(layout, num_blocks, memory)
        self._cache = cache_memory(layout, num_blocks, memory.data_ptr(), None if on_cpu else where.index or 0)
        self._life_word = memory[life : life + 16].view(torch.int64)
        self._life_word[0] = spec.epoch
        self._agent.register(memory.data_ptr(), nbytes, self._cache.device)
        address = NixlAddress(self._agent.metadata(), memory.data_ptr(), self._cache.device)
        self.descriptor = spec.descriptor(address.encode())

    def connect_to(self, peer: MemoryDescriptor) -> Connection:
        address = NixlAddress.decode(peer.address)
        remote = cache_memory(peer.layout, peer.num_blocks, address.base, address.device)
        name = self._agent.meet(address.metadata)
        connection = OneSidedConnection(self._agent, name, self._cache, remote)
        connection.greet(peer.epoch, self._life_word)
        return connection
