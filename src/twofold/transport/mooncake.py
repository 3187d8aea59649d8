"""Transport `mooncake`: shared memory within a host, Mooncake's transfer engine between hosts."""

import os
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import torch

from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError, InstanceLostError
from twofold.transport.base import Connection, KvCacheSpec, MemoryDescriptor, TransportAddress
from twofold.transport.one_sided import LIFE_BYTES, CacheMemory, OneSidedConnection, Operation, Pieces, pause
from twofold.transport.shared_memory import SharedMemoryTransport

# Maximum number of pieces in flight; the engine's queue holds 1,024 per peer and refuses more.
MAX_UNDER_WAY = 256
_DONE, _FAILED = 1, -1  # status of a piece; anything else is in flight

# The engine reads them at start. After a timeout it would report a failed write although bytes may still arrive, so
# timeouts are off; the controller reports dead peers. TCP protocol 1 reports a write as done once it left the sender.
_NEVER_S = str(365 * 24 * 3600)
_SETTINGS = {"MC_TCP_PROTO": "2", "MC_TCP_PROGRESS_TIMEOUT_SEC": _NEVER_S, "MC_TCP_STATUS_TIMEOUT_SEC": _NEVER_S}


class MooncakeEngine:
    """Thread-safe interface to Mooncake's transfer engine. `session` is the engine's address for peers."""

    def __init__(self, address: str) -> None:
        """Start an engine at the network address `address`. Raises ConfigurationError on failure."""
        os.environ.update(_SETTINGS)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        if address.startswith("["):
            os.environ["MC_USE_IPV6"] = "1"
        self._engine = _load()
        # TCP is the fallback: the engine always looks for RDMA devices first.
        if self._engine.initialize(address, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigurationError(f"cannot start Mooncake's transfer engine at {address}")
        self.session = f"{address}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write and read a range of host memory. Raises ConfigurationError on failure."""
        if self._engine.register_memory(address, nbytes):
            raise ConfigurationError(f"Mooncake cannot register {nbytes / 2**20:,.0f} MiB of memory")

    def forget(self, peer: str) -> None:
        """Do nothing, because the connection ends when the peer exits."""

    def move(
        self, operation: Operation, local: Pieces, remote: Pieces, peer: str, cancelled: Callable[[], bool]
    ) -> None:
        """Copy memory ranges to or from a peer (see `TransferEngine.move`)."""
        engine, under_way, whole = self._engine, deque[int](), True
        submit = engine.batch_transfer_async_write if operation == "WRITE" else engine.batch_transfer_async_read
        # One by one: a call with several pieces returns at the first failure, and the others could then still be
        # written after the lease has ended.
        for (here, nbytes), (there, _) in zip(local.rows.tolist(), remote.rows.tolist(), strict=True):
            if len(under_way) == MAX_UNDER_WAY:
                whole = _moved(engine, under_way.popleft(), cancelled)
            number = submit(peer, [here], [there], [nbytes]) if whole and not cancelled() else 0
            if number == 0:  # also if the engine cannot read the memory description of the peer
                whole = False
                break
            under_way.append(number)
        for number in under_way:
            whole = _moved(engine, number, cancelled) and whole
        if not whole:
            raise InstanceLostError(f"Mooncake cannot reach {peer}")

    def close(self) -> None:
        """Stop the engine, so that peers can no longer access the memory."""
        del self._engine


def _moved(engine: Any, number: int, cancelled: Callable[[], bool]) -> bool:  # noqa: ANN401
    began, checks = time.perf_counter(), 0
    while (status := engine.transfer_check_status(number)) not in {_DONE, _FAILED}:
        if cancelled():
            return False
        pause(checks, time.perf_counter() - began)
        checks += 1
    return bool(status == _DONE)


def _load() -> Any:  # noqa: ANN401  (untyped compiled code)
    try:
        return import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise ConfigurationError(
            f"cannot load Mooncake's transfer engine ({error}): "
            "install the system packages libibverbs1, libnuma1 and libcurl4 (Debian names)"
        ) from error


# Address range for the memory of epochs, far from the addresses of the kernel and the allocators.
_FIRST, _LAST = 1 << 44, 1 << 46
_HUGE_PAGE = 2 << 20


class MooncakeAddress(TransportAddress, frozen=True, tag=True):
    """Address of a KV cache: shared memory for peers on the same host, an engine address for other peers."""

    transport = "mooncake"

    host: str
    memory: str  # for peers on the same host
    session: str  # for other peers
    base: int  # address of the pool in the owner's process
    life: int  # address of the epoch number in the owner's process


class MooncakeTransport(SharedMemoryTransport):
    """Transport that uses shared memory with peers on this host, and Mooncake's engine with other peers."""

    writes_outlive_lease = True  # data of an ended process may still be in the network

    def __init__(self, spec: KvCacheSpec) -> None:
        network = spec.network
        if network is None:
            raise ConfigurationError("--transport mooncake needs several hosts: see --listen-workers")
        super().__init__(spec)
        self._host = network.host
        # The engine may reconnect to a new process at the port of the old peer. Each epoch therefore has other memory
        # addresses, so that writes for an old epoch are refused.
        base = self._memory.map_again(own_address(spec.epoch, self._memory.nbytes))
        self._life_word = torch.zeros(LIFE_BYTES // 8, dtype=torch.int64)
        self._life_word[0] = spec.epoch
        self._engine = MooncakeEngine(network.address)
        self._engine.register(base, self._memory.nbytes)
        self._engine.register(self._life_word.data_ptr(), LIFE_BYTES)
        address = MooncakeAddress(
            host=network.host,
            memory=self.descriptor.address,
            session=self._engine.session,
            base=base,
            life=self._life_word.data_ptr(),
        )
        self._cache = _cache_memory(spec.layout, spec.num_blocks, address)
        self.descriptor = msgspec.structs.replace(self.descriptor, address=address.encode())

    def connect_to(self, peer: MemoryDescriptor) -> Connection:
        address = MooncakeAddress.decode(peer.address)
        if address.host == self._host:
            return super().connect_to(msgspec.structs.replace(peer, address=address.memory))
        remote = _cache_memory(peer.layout, peer.num_blocks, address)
        connection = OneSidedConnection(self._engine, address.session, self._cache, remote, self.stage)
        connection.greet(peer.epoch, self._life_word)
        return connection

    def close(self) -> None:
        self._engine.close()
        super().close()


def own_address(epoch: int, nbytes: int) -> int:
    """Return the virtual address at which a worker maps a KV cache of `nbytes` bytes.

    The address depends on `epoch`, a number that changes at every restart of the worker.
    """
    place = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    return _FIRST + epoch % ((_LAST - _FIRST) // place) * place


def _cache_memory(layout: KvLayout, num_blocks: int, address: MooncakeAddress) -> CacheMemory:
    scratch = address.base + layout.pool_bytes(num_blocks)
    return CacheMemory(layout, num_blocks, base=address.base, life=address.life, scratch=scratch)
