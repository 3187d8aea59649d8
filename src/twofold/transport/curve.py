"""Transport `curve`: shared memory within a host, encrypted ZeroMQ messages (CURVE) between hosts.

The receiving host itself writes the data into its cache, and only into blocks leased to the sender. After the end of a
lease, no data of the sender is written.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from twofold.errors import ConfigurationError, InstanceLostError, StaleEpochError
from twofold.handoff import Lease
from twofold.security.guard import Context, Guard
from twofold.security.key import read_key
from twofold.transport import curve_server
from twofold.transport.base import Connection, KvCacheSpec, MemoryDescriptor, TransportAddress
from twofold.transport.pooled import PooledTransport
from twofold.transport.shared_memory import SharedMemoryTransport

_LOOK_MS = 50  # between checks for a closed or broken connection


class CurveConnection:
    """Thread-safe connection to a peer's `CurveServer`."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, ours: PooledTransport, peer: MemoryDescriptor) -> None:
        self._socket, self._ours, self._peer = socket, ours, peer
        self._breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._answers = msgspec.msgpack.Decoder[curve_server.CurveReply](curve_server.CurveReply)
        self._lock = threading.Lock()
        self._closed = False
        self._asked = 0

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        source, span = self._ours.descriptor.instance, (layers.start, layers.stop)
        question = curve_server.WriteBlocks(source, self._peer.epoch, span, tuple(target_blocks))
        self._ask(question, curve_server.gather(self._ours.engine_pool, layers, source_blocks))
        return self._peer.layout.bytes_of(layers, len(source_blocks))

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        frames = self._ask(curve_server.ReadBlocks(self._peer.epoch, (layers.start, layers.stop), tuple(source_blocks)))
        curve_server.scatter(self._ours.landing_pool, layers, target_blocks, frames)
        return self._peer.layout.bytes_of(layers, len(source_blocks))

    def probe(self, nbytes: int) -> None:
        self._ask(curve_server.Probe(self._peer.epoch), [bytes(nbytes)])

    def close(self) -> None:
        """Close the sockets."""
        self._closed = True
        # A thread that waits for a reply holds the lock, and closes the sockets itself.
        if self._lock.acquire(blocking=False):
            try:
                if not self._socket.closed:
                    self._socket.disable_monitor()
                    self._breaks.close(linger=0)
                    self._socket.close(linger=0)
            finally:
                self._lock.release()

    def _ask(self, question: curve_server.CurveRequest, data: Sequence[curve_server.Bytes] = ()) -> list[zmq.Frame]:
        """Send a request to the peer, and return the data in the reply.

        Raise StaleEpochError if the peer refuses the request, or InstanceLostError if the connection is closed.
        """
        try:
            with self._lock:
                self._asked += 1
                frames = [self._asked.to_bytes(8), msgspec.msgpack.encode(question), *data]
                _number, answer, *found = self._answer(frames)
        finally:
            if self._closed:
                self.close()
        reply = self._answers.decode(answer.buffer)
        if isinstance(reply, curve_server.Denied):
            raise StaleEpochError(f"{self._peer.instance} refused KV: {reply.reason}")
        return found

    def _answer(self, frames: list[curve_server.Bytes]) -> list[zmq.Frame]:
        asked = False
        while not self._closed:
            if not asked:
                self._socket.send_multipart(frames, copy=False)
                asked = True
            if self._socket.poll(_LOOK_MS):
                found = self._socket.recv_multipart(copy=False)
                if found[0].bytes == frames[0]:
                    return found
            while self._breaks.poll(0):  # reconnected: send the request again
                recv_monitor_message(self._breaks)
                asked = False
        raise InstanceLostError(f"{self._peer.instance} was lost")


class CurveAddress(TransportAddress, frozen=True, tag=True):
    """Address of a KV cache. Peers on the same `host` map `memory`; peers on other hosts connect to `server`."""

    transport = "curve"

    host: str
    memory: str
    server: str


class CurveTransport(SharedMemoryTransport):
    """Transport by shared memory to peers on this host, and by encrypted ZeroMQ messages to those on other hosts."""

    def __init__(self, spec: KvCacheSpec) -> None:
        network = spec.network
        if network is None:
            raise ConfigurationError("--transport curve needs several hosts: see --listen-workers")
        super().__init__(spec)
        self._host = network.host
        self._context: Context = zmq.Context()
        self._guard = Guard(self._context, read_key(Path(network.key_file)))
        self._gate = curve_server.LeaseGate()
        self._server = curve_server.CurveServer(
            self._context, self._guard, network.address, spec.epoch, self.landing_pool, self._gate
        )
        address = CurveAddress(network.host, self.descriptor.address, self._server.address)
        self.descriptor = msgspec.structs.replace(self.descriptor, address=address.encode())

    def connect_to(self, peer: MemoryDescriptor) -> Connection:
        address = CurveAddress.decode(peer.address)
        if address.host == self._host:
            return super().connect_to(msgspec.structs.replace(peer, address=address.memory))
        socket = self._context.socket(zmq.DEALER)
        self._guard.call(socket, address.server, bulk=True)
        return CurveConnection(socket, address.server, self, peer)

    def granted(self, lease: Lease) -> None:
        self._gate.open(lease.source, lease.request_id, lease.blocks)

    def ended(self, lease: Lease) -> None:
        self._gate.close(lease.source, lease.request_id)

    def close(self) -> None:
        self._server.close()
        self._guard.close()
        self._context.destroy(linger=0)
        super().close()
