"""What a worker knows of its peers: where their inboxes are, and their caches open for writing and reading."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twofold.errors import InstanceLostError, StaleEpochError, TwofoldError
from twofold.security.network import HOME
from twofold.serving.messages import Peer
from twofold.transport.base import Connection, MemoryDescriptor, Transport


class PeerDirectory:
    """Peers by instance id. Connections are opened when first used and dropped with the life they belong to.

    A connection may take its time, and a peer may be lost meanwhile: `update` and `remove` never wait for one.
    """

    def __init__(self, transport: Transport, host: str = HOME) -> None:
        self._transport = transport
        self.host = host
        self._peers: dict[str, Peer] = {}
        self._connections: dict[str, Connection] = {}
        self._fenced: dict[str, int] = {}  # the last epoch that was
        self._known = threading.Lock()  # guards all three
        self._connecting = threading.Lock()  # taken first
        self.on_update: Callable[[], None] | None = None

    @property
    def own_memory(self) -> MemoryDescriptor:
        return self._transport.descriptor

    @property
    def transport(self) -> Transport:
        return self._transport

    def update(self, peers: list[Peer]) -> None:
        """Replace what is known; a peer with a new epoch has new memory."""
        known = {peer.memory.instance: peer for peer in peers}
        with self._known:
            over = [
                instance
                for instance, old in self._peers.items()
                if instance not in known or known[instance].memory.epoch != old.memory.epoch
            ]
            self._peers = known
        for instance in over:
            self._disconnect(instance)
        if self.on_update is not None:
            self.on_update()

    def fence(self, instance: str) -> None:
        """A peer was given up: whoever waits for it waits no more, and nobody connects to this life of it.

        Where what is read may still land after that, it is waited for until the peer is dead.
        """
        with self._known:
            peer = self._peers.get(instance)
            if peer is not None:
                self._fenced[instance] = peer.memory.epoch
        if not self._transport.writes_outlive_lease:
            self._disconnect(instance)

    def remove(self, instance: str) -> None:
        """A peer is gone. A write or a read under way does no harm."""
        with self._known:
            self._peers.pop(instance, None)
        self._disconnect(instance)

    def inbox(self, instance: str) -> str | None:
        peer = self._peers.get(instance)
        return None if peer is None else peer.inbox_from(self.host)

    def inboxes(self) -> list[str]:
        own = self.own_memory.instance
        return [peer.inbox_from(self.host) for instance, peer in self._peers.items() if instance != own]

    def elsewhere(self, instance: str) -> bool:
        """Whether this peer is on another host."""
        peer = self._peers.get(instance)
        return peer is not None and peer.host != self.host

    def others(self) -> list[MemoryDescriptor]:
        """The caches of all peers but ourselves."""
        own = self.own_memory.instance
        return [peer.memory for instance, peer in self._peers.items() if instance != own]

    @contextmanager
    def connected(self, instance: str, epoch: int) -> Iterator[Connection]:
        """The peer's cache, for as long as it can be reached: a connection that fails is not used again.

        Raises InstanceLostError or StaleEpochError when that life of it is over.
        """
        connection = self._connection(instance, epoch)
        try:
            yield connection
        except TwofoldError:
            with self._known:
                known = self._connections.get(instance) is connection
                if known:
                    del self._connections[instance]
            if known:
                connection.close()
            raise

    def _connection(self, instance: str, epoch: int) -> Connection:
        with self._connecting:
            with self._known:
                memory = self._memory(instance, epoch)
                connection = self._connections.get(instance)
            if connection is not None:
                return connection
            connection = self._transport.connect(memory)
            try:
                with self._known:
                    self._memory(instance, epoch)
                    self._connections[instance] = connection
            except (InstanceLostError, StaleEpochError):  # while we connected
                connection.close()
                raise
            return connection

    def _memory(self, instance: str, epoch: int) -> MemoryDescriptor:
        peer = self._peers.get(instance)
        if peer is None:
            raise InstanceLostError(f"{instance} is not part of the service any more")
        if peer.memory.epoch != epoch:
            raise StaleEpochError(f"epoch {epoch} of {instance} is over")
        if self._fenced.get(instance) == epoch:
            raise InstanceLostError(f"{instance} was given up")
        return peer.memory

    def _disconnect(self, instance: str) -> None:
        with self._known:
            connection = self._connections.pop(instance, None)
        if connection is not None:
            connection.close()
