"""The thread of a store that gives blocks to the stores of other hosts.

The thread of a store that brings blocks from the stores of other hosts.
"""

import logging
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import zmq

from twofold.security.guard import ENCRYPTION_BYTES, Guard
from twofold.serving.store.events import EventQueue
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import MOST_KEYS, MOST_QUESTION_BYTES, Block, BlocksFollow, GetBlocks

log = logging.getLogger(__name__)

GONE_MS = (
    10_000  # a host that acknowledges nothing for so long is gone, and what was on its way to it is dropped
)


class PeerCaller(NamedTuple):
    """A store that asks: its connection, and the number of its question."""

    connection: bytes
    number: int


class PeerRequest(NamedTuple):
    """A question of another store: these blocks, as far as they are here."""

    caller: PeerCaller
    keys: list[bytes]


class PeerReply(NamedTuple):
    """Some more blocks of a question, by their index in it; `load` is what holds them until they are `ReplySent`."""

    load: int
    caller: PeerCaller
    blocks: dict[int, Block]
    last: bool


class ReplySent(NamedTuple):
    """The slots of a gift are read no more."""

    gift: PeerReply


class BlockServer:
    """Hears the questions of other stores at `address`, and sends them blocks out of `memory`.

    Bytes are copied when they are sent, so nothing is held for a store that is slow, or dead: what it does not take is
    dropped. Only those who have the cluster key are heard. `fileno` is readable while there is something to `take`.
    """

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
        self._socket.setsockopt(
            zmq.SNDHWM, MOST_KEYS
        )  # no question has more answers: none of them is dropped
        self._socket.bind(f"tcp://{host_address}:*")
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        self.dropped = 0  # frames that are no question
        self._questions = msgspec.msgpack.Decoder(GetBlocks)
        self._gifts: EventQueue[PeerReply | None] = EventQueue()
        self._said: EventQueue[PeerRequest | ReplySent] = EventQueue()
        self._thread = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._said.fileno()

    def take(self) -> Iterator[PeerRequest | ReplySent]:
        """What was asked, and what was sent, since this was asked last."""
        return self._said.drain()

    def give(self, gift: PeerReply) -> None:
        """Send blocks, which are held until they are `ReplySent`."""
        self._gifts.put(gift)

    def close(self) -> None:
        """End when what there was to give is sent."""
        self._gifts.put(None)
        self._thread.join()
        self._socket.close(linger=0)
        self._gifts.close()
        self._said.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._gifts.fileno(), zmq.POLLIN)
        while True:
            if self._socket in dict(poller.poll()):
                self._hear()
            for gift in self._gifts.drain():
                if gift is None:
                    return
                self._send(gift)

    def _hear(self) -> None:
        connection, *frames = self._socket.recv_multipart()
        try:
            (frame,) = frames
            question = self._questions.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.dropped += 1
            log.warning("what another store asks is no question (%s)", type(error).__name__)
            return
        caller, keys = PeerCaller(connection, question.number), question.keys
        if question.contents != self._contents:
            log.warning("the store of another host has blocks of another model or layout: it is given none")
            keys = []
        self._said.put(PeerRequest(caller, keys))

    def _send(self, gift: PeerReply) -> None:
        checksums = {index: block.checksum for index, block in gift.blocks.items()}
        given = BlocksFollow(gift.caller.number, checksums, gift.last)
        slots = [self._memory.slot(block.slot) for block in gift.blocks.values()]
        self._socket.send_multipart([gift.caller.connection, msgspec.msgpack.encode(given), *slots])
        self._said.put(ReplySent(gift))


# Ends of a connection, or of the attempt at one: a life of a store has one address, and is not called again.
_BREAKS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class FetchOrder(NamedTuple):
    """For a fetch: fill these leased slots with these blocks, neighbours in a prompt, of the store at `address`."""

    fetch: int
    address: str
    keys: Sequence[bytes]
    slots: Sequence[int]


class FetchEnd(NamedTuple):
    """Nothing more is wanted of a fetch. An order under way is answered with what has come."""

    fetch: int


class FetchedSlots(NamedTuple):
    """These slots are filled, and no slot of the order is touched any more; `whole`: they are all that were ordered."""

    fetch: int
    blocks: list[Block]
    whole: bool


class BlockFetcher:
    """Has a connection for each fetch, from its first order on until it is over; orders of a fetch come in turn.

    A block whose bytes do not fit the checksum that its writer computed is not written, and ends the fetch, as does
    whatever else a store of another host might say. `fileno` is readable while there is something to `take`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], guard: Guard, memory: SlotMemory, contents: bytes
    ) -> None:
        self._context, self._guard, self._memory, self._contents = context, guard, memory, contents
        self._ways: dict[int, _Way] = {}
        self._poller = zmq.Poller()
        self._orders: EventQueue[FetchOrder | FetchEnd | None] = EventQueue()
        self._brought: EventQueue[FetchedSlots] = EventQueue()
        self._thread = threading.Thread(target=self._run, name="store-fetcher", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._brought.fileno()

    def take(self) -> Iterator[FetchedSlots]:
        """What came of orders since this was asked last."""
        return self._brought.drain()

    def bring(self, order: FetchOrder) -> None:
        self._orders.put(order)

    def over(self, fetch: int) -> None:
        self._orders.put(FetchEnd(fetch))

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()
        self._orders.close()
        self._brought.close()

    def _run(self) -> None:
        self._poller.register(self._orders.fileno(), zmq.POLLIN)
        while True:
            ready = dict(self._poller.poll())
            for fetch, way in list(self._ways.items()):
                if way.socket in ready:
                    self._hear(fetch, way)
                elif way.breaks in ready:
                    self._break(fetch, way, "it is not there any more")
            for order in self._orders.drain():
                if order is None:
                    for fetch in list(self._ways):
                        self._end(fetch)
                    return
                if isinstance(order, FetchEnd):
                    self._end(order.fetch)
                else:
                    self._begin(order)

    def _begin(self, order: FetchOrder) -> None:
        way = self._ways.get(order.fetch)
        try:
            if way is None:
                way = self._ways[order.fetch] = self._open(order.address)
            way.order(order, self._contents)
        except zmq.ZMQError as error:
            log.warning("the store at %s cannot be asked: %s", order.address, error.strerror)
            self._brought.put(FetchedSlots(order.fetch, [], whole=False))

    def _open(self, address: str) -> "_Way":
        socket = self._context.socket(zmq.DEALER)
        self._guard.call(socket, address, bulk=True)
        socket.setsockopt(zmq.TCP_MAXRT, GONE_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self._memory.block_bytes, 1 << 20) + ENCRYPTION_BYTES)
        way = _Way(socket, address)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            way.close()
            raise
        self._poller.register(way.socket, zmq.POLLIN)
        self._poller.register(way.breaks, zmq.POLLIN)
        return way

    def _hear(self, fetch: int, way: "_Way") -> None:
        frames = way.socket.recv_multipart(copy=False)
        try:
            last = way.take(frames, self._memory)
        except (msgspec.MsgspecError, ValueError, LookupError, RecursionError) as error:
            self._break(fetch, way, f"what it sent is not what was asked for ({error})")
            return
        if last:
            self._answer(fetch, way)

    def _break(self, fetch: int, way: "_Way", why: str) -> None:
        """Nothing more comes over this connection; what is ordered yet is not brought."""
        log.warning("blocks of the store at %s do not come: %s", way.address, why)
        self._poller.unregister(way.socket)
        self._poller.unregister(way.breaks)
        way.close()
        if way.under_way:
            self._answer(fetch, way)

    def _answer(self, fetch: int, way: "_Way") -> None:
        way.under_way = False
        self._brought.put(FetchedSlots(fetch, way.filled, whole=not way.slots))

    def _end(self, fetch: int) -> None:
        way = self._ways.pop(fetch, None)
        if way is None:
            return
        if not way.socket.closed:
            self._poller.unregister(way.socket)
            self._poller.unregister(way.breaks)
            way.close()
        if way.under_way:
            self._answer(fetch, way)


class _Way:
    """A connection to another store, and the order that is under way over it."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self.socket, self.address = socket, address
        self.breaks = socket.get_monitor_socket(_BREAKS)
        self.slots: dict[int, int] = {}  # those to be filled yet, by the index of the block in the question
        self.filled: list[Block] = []
        self.under_way = False
        self._number = 0
        self._answers = msgspec.msgpack.Decoder(BlocksFollow)

    def order(self, order: FetchOrder, contents: bytes) -> None:
        """Raises ZMQError where the connection is broken."""
        self._number += 1
        question = GetBlocks(contents, self._number, list(order.keys))
        self.socket.send(msgspec.msgpack.encode(question), zmq.NOBLOCK)
        self.slots, self.filled, self.under_way = dict(enumerate(order.slots)), [], True

    def take(self, frames: Sequence[zmq.Frame], memory: SlotMemory) -> bool:
        """Write blocks into their slots, as far as they are whole; returns whether no more are to come.

        Raises MsgspecError, ValueError, LookupError or RecursionError for what does not belong to what was asked.
        """
        given = self._answers.decode(frames[0].buffer)
        if not self.under_way or given.number != self._number:
            raise ValueError("an answer to nothing")
        for (index, checksum), frame in zip(given.checksums.items(), frames[1:], strict=True):
            slot, block = self.slots[index], frame.buffer
            if len(block) != memory.block_bytes or zlib.crc32(block) != checksum:
                raise ValueError("a block that is not as it was written")
            memory.slot(slot)[:] = block
            del self.slots[index]
            self.filled.append(Block(slot, checksum))
        return given.last

    def close(self) -> None:
        self.socket.disable_monitor()
        self.breaks.close(linger=0)
        self.socket.close(linger=0)
