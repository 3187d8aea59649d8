"""Peers of a worker: addresses of their inboxes, connections to their KV caches, and measured link speeds."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twofold.errors import InstanceLostError, StaleEpochError, TwofoldError
from twofold.performance.transfer import LinkSpeed
from twofold.security.network import HOME
from twofold.serving.messages import Peer
from twofold.transport.base import SCRATCH_BYTES, Connection, MemoryDescriptor, Transport

SMALL_PROBE_BYTES, SMALL_PROBES = 16 << 10, 9
LARGE_PROBE_BYTES, LARGE_PROBES = 256 << 10, 3
PROBE_S = 0.025  # long enough to measure bandwidth


class PeerDirectory:
    """Registry of a worker's peers, with the inbox address of each peer and the connections to the peers' KV caches."""

    def __init__(self, transport: Transport, host: str = HOME) -> None:
        self.transport, self.own_memory, self.host = transport, transport.descriptor, host
        self._peers: dict[str, Peer] = {}
        self._connections: dict[str, Connection] = {}  # opened on first use
        self._fenced: dict[str, int] = {}  # last fenced epoch by instance
        self._known = threading.Lock()  # guards the three dicts above
        self._connecting = threading.Lock()  # acquired before `_known`; not by `update` and `remove`
        self.on_update: Callable[[], None] | None = None

    def update(self, peers: list[Peer]) -> None:
        """Replace the list of peers, and close connections to peers that have left or restarted."""
        known = {peer.memory.instance: peer for peer in peers}
        epochs = {peer.memory.instance: peer.memory.epoch for peer in peers}
        with self._known:
            over = [instance for instance, old in self._peers.items() if epochs.get(instance) != old.memory.epoch]
            self._peers = known
        for instance in over:
            self._disconnect(instance)
        if self.on_update is not None:
            self.on_update()

    def fence(self, instance: str) -> None:
        """Refuse new connections to a peer that is about to be killed."""
        with self._known:
            peer = self._peers.get(instance)
            if peer is not None:
                self._fenced[instance] = peer.memory.epoch
        if not self.transport.writes_outlive_lease:
            self._disconnect(instance)

    def remove(self, instance: str) -> None:
        """Remove a dead peer. Running transfers from and to it fail."""
        with self._known:
            self._peers.pop(instance, None)
        self._disconnect(instance)

    def inbox(self, instance: str) -> str | None:
        peer = self._peers.get(instance)
        return None if peer is None else peer.inbox_from(self.host)

    def elsewhere(self, instance: str) -> bool:
        """Return whether a peer is on another host."""
        peer = self._peers.get(instance)
        return peer is not None and peer.host != self.host

    def others(self) -> list[Peer]:
        """Return all peers but this worker."""
        own = self.own_memory.instance
        return [peer for instance, peer in self._peers.items() if instance != own]

    @contextmanager
    def connected(self, instance: str, epoch: int) -> Iterator[Connection]:
        """Yield a connection to a peer's KV cache. Raises InstanceLostError or StaleEpochError if the peer is gone."""
        connection = self._connection(instance, epoch)
        try:
            yield connection
        except TwofoldError:  # an error closes the connection
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
            connection = self.transport.connect(memory)
            try:
                with self._known:
                    self._memory(instance, epoch)
                    self._connections[instance] = connection
            except (InstanceLostError, StaleEpochError):  # lost while connecting
                connection.close()
                raise
            return connection

    def _memory(self, instance: str, epoch: int) -> MemoryDescriptor:
        peer = self._peers.get(instance)
        if peer is None:
            raise InstanceLostError(f"{instance} has left the service")
        if peer.memory.epoch != epoch:
            raise StaleEpochError(f"epoch {epoch} of {instance} has ended")
        if self._fenced.get(instance) == epoch:
            raise InstanceLostError(f"{instance} is being stopped")
        return peer.memory

    def _disconnect(self, instance: str) -> None:
        with self._known:
            connection = self._connections.pop(instance, None)
        if connection is not None:
            connection.close()


class LinkProber:
    """Thread that measures the link to each new peer once."""

    def __init__(self, peers: PeerDirectory, report: Callable[[str, LinkSpeed], None]) -> None:
        self._peers, self._report = peers, report
        self._measured: set[tuple[str, int]] = set()
        self._updated = threading.Event()

    def start(self) -> None:
        self._peers.on_update = self._updated.set
        threading.Thread(target=self._run, name="link-prober", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._updated.wait()
            self._updated.clear()
            for peer in self._peers.others():
                life = (peer.memory.instance, peer.memory.epoch)
                if life not in self._measured:
                    self._measured.add(life)
                    self._measure(*life)

    def _measure(self, instance: str, epoch: int) -> None:
        try:
            with self._peers.connected(instance, epoch) as connection:
                speed = link_speed(connection)
        except TwofoldError:
            return  # a hand-off reports an unreachable peer
        self._report(instance, speed)


def link_speed(connection: Connection, clock: Callable[[], float] = time.perf_counter) -> LinkSpeed:
    """Measure the latency of a link with small transfers, and its bandwidth with large transfers."""

    def probe_s(nbytes: int) -> float:
        began = clock()
        connection.probe(nbytes)
        return clock() - began

    probe_s(SMALL_PROBE_BYTES)  # the first access to memory is slow
    small_s = statistics.median(probe_s(SMALL_PROBE_BYTES) for _ in range(SMALL_PROBES))
    size = LARGE_PROBE_BYTES
    while probe_s(size) < PROBE_S and size < SCRATCH_BYTES:
        size *= 4
    large_s = statistics.median([probe_s(size) for _ in range(LARGE_PROBES)])
    return LinkSpeed.fit((SMALL_PROBE_BYTES, small_s), (size, large_s))
