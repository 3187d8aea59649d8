"""Mooncake's transfer engine, as far as a transport needs one.

It has calls that move many pieces at once and wait for them. They return as soon as one piece has failed, with others
still on their way, and an engine cannot be told to stop; whoever had lent the memory would then have it written to.
So each piece is submitted by itself here, and all are waited for to their end.

Transport `mooncake`: shared memory between instances of one host, Mooncake's transfer engine between hosts.

Within a host it would be TCP as well, and what a killed writer has left in its sockets lands after its death (some MiB,
measured). Where peers share memory nothing is left.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec
import torch

from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import copy_blocks
from twofold.errors import ConfigurationError, InstanceLostError
from twofold.security.network import HostNetwork
from twofold.transport.base import Connection, MemoryDescriptor, TransportAddress, check_layout
from twofold.transport.one_sided import LIFE_BYTES, CacheMemory, OneSidedConnection, Operation, Pieces, pause
from twofold.transport.shared_memory import SharedMemoryTransport

# Pieces that the engine has at a time; it refuses those that do not fit into its queue (1,024 for each peer).
MAX_UNDER_WAY = 256
_DONE, _FAILED = 1, -1  # what it says of a piece; anything else is still under way

# It reads these once. After a time limit it would say that a write has failed whose bytes may yet arrive: who has died
# is told by the controller. And the first version of its protocol calls written what has left the writer.
_NEVER_S = str(365 * 24 * 3600)
_SETTINGS = {
    "MC_TCP_PROTO": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": _NEVER_S,
    "MC_TCP_STATUS_TIMEOUT_SEC": _NEVER_S,
}


class MooncakeEngine:
    """Registers memory and moves pieces between a peer's and ours; peers are called by `session`.

    Safe to use from several threads; each transfer waits in the thread that asked for it. Where it is given up,
    because the peer is dead, the engine ends what is left by itself.
    """

    def __init__(self, address: str) -> None:
        """`address` is how other hosts reach this one; one of IPv6 is in brackets. Raises ConfigurationError."""
        os.environ.update(_SETTINGS)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        if address.startswith("["):
            os.environ["MC_USE_IPV6"] = "1"
        self._engine = _load()
        # TCP is what it takes where it finds no RDMA device; it looks for those whatever is written here.
        if self._engine.initialize(address, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigurationError(f"Mooncake's transfer engine cannot start at {address}")
        self.session = f"{address}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write and read this memory of the host; raises ConfigurationError."""
        if self._engine.register_memory(address, nbytes):
            raise ConfigurationError(f"Mooncake cannot register {nbytes / 2**20:,.0f} MiB of memory")

    def forget(self, peer: str) -> None:
        """There is nothing to drop: its sockets end with the peer's."""

    def move(
        self, operation: Operation, local: Pieces, remote: Pieces, peer: str, given_up: Callable[[], bool]
    ) -> None:
        """As `Mover.move` is to."""
        engine, under_way, whole = self._engine, deque[int](), True
        submit = (
            engine.batch_transfer_async_write if operation == "WRITE" else engine.batch_transfer_async_read
        )
        for (here, nbytes), (there, _) in zip(local.rows.tolist(), remote.rows.tolist(), strict=True):
            if len(under_way) == MAX_UNDER_WAY:
                whole = _moved(engine, under_way.popleft(), given_up)
            number = submit(peer, [here], [there], [nbytes]) if whole and not given_up() else 0
            if number == 0:  # also where it cannot ask the peer what its memory is
                whole = False
                break
            under_way.append(number)
        for number in under_way:
            whole = _moved(engine, number, given_up) and whole
        if not whole:
            raise InstanceLostError(f"Mooncake cannot reach {peer}")

    def close(self) -> None:
        """Peers cannot reach our memory any more."""
        del self._engine


def _moved(engine: Any, number: int, given_up: Callable[[], bool]) -> bool:  # noqa: ANN401  (as below)
    """Whether this piece was moved; returns when it was, failed, or was given up."""
    began, checks = time.perf_counter(), 0
    while (status := engine.transfer_check_status(number)) not in {_DONE, _FAILED}:
        if given_up():
            return False
        pause(checks, time.perf_counter() - began)
        checks += 1
    return bool(status == _DONE)


def _load() -> Any:  # noqa: ANN401  (an object of compiled code without types)
    try:
        return import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise ConfigurationError(
            f"Mooncake's transfer engine cannot be loaded ({error}): "
            "it needs libibverbs1, libnuma1 and libcurl4 of the system, as Debian names them"
        ) from error


# Where lives have the addresses that peers write to: far from what the kernel and the allocators give.
_FIRST, _LAST = 1 << 44, 1 << 46
_HUGE_PAGE = 2 << 20


class MooncakeAddress(TransportAddress, frozen=True, tag=True):
    """What `MemoryDescriptor.address` holds: the memory for those on this host, and for others the engine's.

    `session` is the engine's name and address, `base` where the pool begins and `life` where the life word is.
    """

    transport = "mooncake"

    host: str
    memory: str
    session: str
    base: int
    life: int


class MooncakeTransport(SharedMemoryTransport):
    """The local cache in memory that peers on this host map, registered with the engine for those on others.

    An engine connects again by itself, and to whoever is at its peer's port by then. So each life has its memory at
    addresses of its own, and what is meant for another life is refused there: it is outside of what is registered.
    A connection reads the peer's life word first.
    """

    writes_outlive_lease = (
        True  # bytes of a process that has ended may wait in the network, and the engine puts them into place
    )

    def __init__(
        self,
        instance: str,
        epoch: int,
        layout: KvLayout,
        num_blocks: int,
        device: str,
        network: HostNetwork | None = None,
    ) -> None:
        if network is None:
            raise ConfigurationError(
                "--transport mooncake is for services of several hosts: see --listen-workers"
            )
        super().__init__(instance, epoch, layout, num_blocks, device)
        self._host = network.host
        base = self._memory.map_again(own_address(epoch, self._memory.nbytes))
        self._life_word = torch.zeros(LIFE_BYTES // 8, dtype=torch.int64)
        self._life_word[0] = epoch
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
        self._cache = _cache_memory(layout, num_blocks, address)
        self.descriptor = msgspec.structs.replace(self.descriptor, address=address.encode())

    def connect(self, peer: MemoryDescriptor) -> Connection:
        check_layout(self.descriptor, peer)
        address = MooncakeAddress.decode(peer.address)
        if address.host == self._host:
            return super().connect(msgspec.structs.replace(peer, address=address.memory))
        remote = _cache_memory(peer.layout, peer.num_blocks, address)
        connection = OneSidedConnection(self._engine, address.session, self._cache, remote, self._stage)
        connection.greet(peer.epoch, self._life_word)
        return connection

    def close(self) -> None:
        self._engine.close()
        super().close()

    def _stage(self, layers: range, blocks: Sequence[int]) -> None:
        """On an accelerator, bring what was computed to where it is sent from."""
        if self.engine_pool is not self.landing_pool:
            with self.engine_pool.copying():
                for layer in layers:
                    copy_blocks(self.engine_pool, layer, blocks, self.landing_pool, blocks)


def own_address(epoch: int, nbytes: int) -> int:
    """Where the memory of this life goes: another place for another epoch, but for one in thousands."""
    place = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    return _FIRST + epoch % ((_LAST - _FIRST) // place) * place


def _cache_memory(layout: KvLayout, num_blocks: int, address: MooncakeAddress) -> CacheMemory:
    """The pool, with the scratch memory behind it as SharedMemoryTransport lays it out, and the life word apart."""
    scratch = address.base + layout.pool_bytes(num_blocks)
    return CacheMemory(layout, num_blocks, base=address.base, life=address.life, scratch=scratch)
