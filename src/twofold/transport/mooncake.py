"""Transport `mooncake`: shared memory between instances of one host, Mooncake's transfer engine between hosts.

Within a host it would be TCP as well, and what a killed writer has left in its sockets lands after its death (some MiB,
measured). Where peers share memory nothing is left.
"""

from collections.abc import Sequence

import msgspec
import torch

from twofold.curve.network import Network
from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import copy_blocks
from twofold.errors import ConfigurationError
from twofold.transport.address import Address
from twofold.transport.base import Connection, MemoryDescriptor, check_layout
from twofold.transport.mooncake_engine import MooncakeEngine
from twofold.transport.one_sided import LIFE_BYTES, CacheMemory, OneSidedConnection
from twofold.transport.shared_memory import SharedMemoryTransport

# Where lives have the addresses that peers write to: far from what the kernel and the allocators give.
_FIRST, _LAST = 1 << 44, 1 << 46
_HUGE_PAGE = 2 << 20


class MooncakeAddress(Address, frozen=True, tag=True):
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

    lingers = (
        True  # bytes of a process that has ended may wait in the network, and the engine puts them into place
    )

    def __init__(
        self,
        instance: str,
        epoch: int,
        layout: KvLayout,
        num_blocks: int,
        device: str,
        network: Network | None = None,
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
