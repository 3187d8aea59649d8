"""What a worker knows of its peers: where their inboxes are, and their caches open for writing."""

from twofold.errors import InstanceLostError, StaleEpochError
from twofold.serving.messages import Peer
from twofold.transport.base import Connection, MemoryDescriptor, Transport


class PeerDirectory:
    """Peers by instance id. Connections are opened when first used and dropped with the life they belong to."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: dict[str, Peer] = {}
        self._connections: dict[str, Connection] = {}

    @property
    def own_memory(self) -> MemoryDescriptor:
        return self._transport.descriptor

    def update(self, peers: list[Peer]) -> None:
        """Replace what is known; a peer with a new epoch has new memory."""
        known = {peer.memory.instance: peer for peer in peers}
        for instance, old in self._peers.items():
            if instance not in known or known[instance].memory.epoch != old.memory.epoch:
                self._disconnect(instance)
        self._peers = known

    def remove(self, instance: str) -> None:
        """A peer is gone. Its mapped memory stays readable, so a write under way does no harm."""
        self._peers.pop(instance, None)
        self._disconnect(instance)

    def inbox(self, instance: str) -> str | None:
        peer = self._peers.get(instance)
        return None if peer is None else peer.inbox

    def inboxes(self) -> list[str]:
        own = self.own_memory.instance
        return [peer.inbox for instance, peer in self._peers.items() if instance != own]

    def connection(self, instance: str, epoch: int) -> Connection:
        """The peer's cache. Raises InstanceLostError or StaleEpochError when that life of it is over."""
        peer = self._peers.get(instance)
        if peer is None:
            raise InstanceLostError(f"{instance} is not part of the service any more")
        if peer.memory.epoch != epoch:
            raise StaleEpochError(f"epoch {epoch} of {instance} is over")
        connection = self._connections.get(instance)
        if connection is None:
            connection = self._connections[instance] = self._transport.connect(peer.memory)
        return connection

    def _disconnect(self, instance: str) -> None:
        connection = self._connections.pop(instance, None)
        if connection is not None:
            connection.close()
