"""Threads of a KV store that send blocks to the stores of other hosts, and fetch blocks from them."""

import logging
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq

from twofold.security.guard import ENCRYPTION_BYTES, Guard
from twofold.serving.store.events import StoreThread
from twofold.serving.store.messages import MOST_KEYS, MOST_QUESTION_BYTES, Block, BlocksFollow, GetBlocks
from twofold.transport.memory import SlotMemory

log = logging.getLogger(__name__)

GONE_MS = 10_000  # a host without TCP acknowledgements for this long is lost, with all data in flight


class PeerRequest(NamedTuple):
    """Request of another KV store for the blocks with the keys `keys`: its connection, and its number there."""

    connection: bytes
    number: int
    keys: list[bytes]


class PeerReply(NamedTuple):
    """Answer to a PeerRequest. `blocks` maps the index of a key in the request to the block that is sent."""

    load: int  # number of the Load request that pins the blocks
    request: PeerRequest
    blocks: dict[int, Block]
    last: bool


class BlockServer(StoreThread[PeerReply, PeerRequest | PeerReply]):
    """Thread that sends KV blocks to other hosts' KV stores on request."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        guard: Guard,
        host_address: str,
        memory: SlotMemory,
        contents: bytes,
    ) -> None:
        self._memory, self._contents = memory, contents
        self._socket = context.socket(zmq.ROUTER)
        guard.listen(self._socket, host_address, bulk=True)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_QUESTION_BYTES + ENCRYPTION_BYTES)
        self._socket.setsockopt(zmq.TCP_MAXRT, GONE_MS)
        self._socket.setsockopt(zmq.SNDHWM, MOST_KEYS)  # no request has more replies than this, so none is dropped
        self._socket.bind(f"tcp://{host_address}:*")
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        self.dropped = 0  # number of malformed requests
        self._decoder = msgspec.msgpack.Decoder(GetBlocks)
        super().__init__("store-server")

    def close(self) -> None:
        super().close()
        self._socket.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._work.fileno(), zmq.POLLIN)
        while True:
            if self._socket in dict(poller.poll()):
                self._receive()
            for reply in self._work.drain():
                if reply is None:
                    return
                self._send(reply)

    def _receive(self) -> None:
        connection, *frames = self._socket.recv_multipart()
        try:
            (frame,) = frames
            request = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.dropped += 1
            log.warning("malformed request of another store (%s)", type(error).__name__)
            return
        keys = request.keys
        if request.contents != self._contents:
            log.warning("refusing a store with another model or KV layout")
            keys = []
        self._results.put(PeerRequest(connection, request.number, keys))

    def _send(self, reply: PeerReply) -> None:
        checksums = {index: block.checksum for index, block in reply.blocks.items()}
        header = BlocksFollow(reply.request.number, checksums, reply.last)
        slots = [self._memory.slot(block.slot) for block in reply.blocks.values()]
        # This copies the blocks, so a slow store does not keep them pinned.
        self._socket.send_multipart([reply.request.connection, msgspec.msgpack.encode(header), *slots])
        self._results.put(reply)


# Failed and broken connections. An epoch of a store has one address, so there is no reconnect.
_BREAKS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class FetchOrder(NamedTuple):
    """Instruction to fetch the blocks of `keys` from the store at `address` into the leased `slots`."""

    fetch: int
    address: str
    keys: Sequence[bytes]
    slots: Sequence[int]


class FetchEnd(NamedTuple):
    """Instruction to end a fetch. Blocks received so far are kept."""

    fetch: int


class FetchedSlots(NamedTuple):
    """Result of a FetchOrder: the filled slots. `whole` is false if some slots were not filled."""

    fetch: int
    blocks: list[Block]
    whole: bool


class BlockFetcher(StoreThread[FetchOrder | FetchEnd, FetchedSlots]):
    """Thread that fetches blocks from other hosts' stores. Invalid data ends a fetch."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], guard: Guard, memory: SlotMemory, contents: bytes
    ) -> None:
        self._context, self._guard, self._memory, self._contents = context, guard, memory, contents
        self._connections: dict[int, _PeerConnection] = {}
        self._poller = zmq.Poller()
        super().__init__("store-fetcher")

    def _run(self) -> None:
        self._poller.register(self._work.fileno(), zmq.POLLIN)
        while True:
            ready = dict(self._poller.poll())
            for fetch, connection in list(self._connections.items()):
                if connection.socket in ready:
                    self._receive(fetch, connection)
                elif connection.breaks in ready:
                    self._disconnect(fetch, connection, "connection lost")
            for order in self._work.drain():
                if order is None:
                    for fetch in list(self._connections):
                        self._end(fetch)
                    return
                if isinstance(order, FetchEnd):
                    self._end(order.fetch)
                else:
                    self._begin(order)

    def _begin(self, order: FetchOrder) -> None:
        connection = self._connections.get(order.fetch)
        try:
            if connection is None:
                connection = self._connections[order.fetch] = self._open(order.address)
            connection.order(order, self._contents)
        except zmq.ZMQError as error:
            log.warning("cannot connect to the store at %s: %s", order.address, error.strerror)
            self._results.put(FetchedSlots(order.fetch, [], whole=False))

    def _open(self, address: str) -> "_PeerConnection":
        socket = self._context.socket(zmq.DEALER)
        self._guard.call(socket, address, bulk=True)
        socket.setsockopt(zmq.TCP_MAXRT, GONE_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self._memory.block_bytes, 1 << 20) + ENCRYPTION_BYTES)
        connection = _PeerConnection(socket, address)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            connection.close()
            raise
        self._poller.register(connection.socket, zmq.POLLIN)
        self._poller.register(connection.breaks, zmq.POLLIN)
        return connection

    def _receive(self, fetch: int, connection: "_PeerConnection") -> None:
        frames = connection.socket.recv_multipart(copy=False)
        try:
            last = connection.take(frames, self._memory)
        except (msgspec.MsgspecError, ValueError, LookupError, RecursionError) as error:
            self._disconnect(fetch, connection, f"invalid reply ({error})")
            return
        if last:
            self._answer(fetch, connection)

    def _disconnect(self, fetch: int, connection: "_PeerConnection", why: str) -> None:
        log.warning("fetch from the store at %s failed: %s", connection.address, why)
        self._close(fetch, connection)

    def _answer(self, fetch: int, connection: "_PeerConnection") -> None:
        connection.busy = False
        self._results.put(FetchedSlots(fetch, connection.filled, whole=not connection.slots))

    def _end(self, fetch: int) -> None:
        connection = self._connections.pop(fetch, None)
        if connection is not None:
            self._close(fetch, connection)

    def _close(self, fetch: int, connection: "_PeerConnection") -> None:
        if not connection.socket.closed:
            self._poller.unregister(connection.socket)
            self._poller.unregister(connection.breaks)
            connection.close()
        if connection.busy:
            self._answer(fetch, connection)


class _PeerConnection:
    """Connection to another store for one fetch."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self.socket, self.address = socket, address
        self.breaks = socket.get_monitor_socket(_BREAKS)
        self.slots: dict[int, int] = {}  # slots still to fill, by block index in the request
        self.filled: list[Block] = []
        self.busy = False
        self._number = 0
        self._decoder = msgspec.msgpack.Decoder(BlocksFollow)

    def order(self, order: FetchOrder, contents: bytes) -> None:
        self._number += 1
        request = GetBlocks(contents, self._number, list(order.keys))
        self.socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
        self.slots, self.filled, self.busy = dict(enumerate(order.slots)), [], True

    def take(self, frames: Sequence[zmq.Frame], memory: SlotMemory) -> bool:
        """Store the blocks of a reply; return whether it is the last reply. Raises an exception for invalid data."""
        reply = self._decoder.decode(frames[0].buffer)
        if not self.busy or reply.number != self._number:
            raise ValueError("no request is pending")
        for (index, checksum), frame in zip(reply.checksums.items(), frames[1:], strict=True):
            slot, block = self.slots[index], frame.buffer
            if len(block) != memory.block_bytes or zlib.crc32(block) != checksum:
                raise ValueError("checksum mismatch")
            memory.slot(slot)[:] = block
            del self.slots[index]
            self.filled.append(Block(slot, checksum))
        return reply.last

    def close(self) -> None:
        self.socket.disable_monitor()
        self.breaks.close(linger=0)
        self.socket.close(linger=0)
