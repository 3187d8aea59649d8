"""Transport `curve`: shared memory between instances of one host, and encrypted frames between those of several.

What comes from another host is written into place by a thread here, and only where a lease of its sender allows it at
that moment. So a lease that has ended is revoked for good, also for a sender that nobody can reach to stop it.
"""

from pathlib import Path

import msgspec
import zmq

from twofold.curve.guard import Guard
from twofold.curve.key import read_key
from twofold.curve.network import Network
from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError
from twofold.handoff import Lease
from twofold.transport.address import Address
from twofold.transport.base import Connection, MemoryDescriptor, check_layout
from twofold.transport.curve_connection import CurveConnection
from twofold.transport.curve_gate import Gate
from twofold.transport.curve_server import CurveServer
from twofold.transport.shared_memory import SharedMemoryTransport


class CurveAddress(Address, frozen=True, tag=True):
    """What `MemoryDescriptor.address` holds: the memory for those on this host, and who writes it for others."""

    transport = "curve"

    host: str
    memory: str
    server: str


class CurveTransport(SharedMemoryTransport):
    """The local cache in memory that peers on this host map, and others have written for them."""

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
                "--transport curve is for services of several hosts: see --listen-workers"
            )
        super().__init__(instance, epoch, layout, num_blocks, device)
        self._host = network.host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = Guard(self._context, read_key(Path(network.key_file)))
        self._gate = Gate()
        self._server = CurveServer(
            self._context, self._guard, network.address, epoch, self.landing_pool, self._gate
        )
        address = CurveAddress(network.host, self.descriptor.address, self._server.address)
        self.descriptor = msgspec.structs.replace(self.descriptor, address=address.encode())

    def connect(self, peer: MemoryDescriptor) -> Connection:
        check_layout(self.descriptor, peer)
        address = CurveAddress.decode(peer.address)
        if address.host == self._host:
            return super().connect(msgspec.structs.replace(peer, address=address.memory))
        socket = self._context.socket(zmq.DEALER)
        self._guard.call(socket, address.server, bulk=True)
        return CurveConnection(
            socket,
            address.server,
            self.descriptor.instance,
            peer,
            self.engine_pool,
            self.landing_pool,
        )

    def granted(self, lease: Lease) -> None:
        self._gate.open(lease.source, lease.request_id, lease.blocks)

    def ended(self, lease: Lease) -> None:
        self._gate.close(lease.source, lease.request_id)

    def close(self) -> None:
        self._server.close()
        self._guard.close()
        self._context.destroy(linger=0)
        super().close()
