"""The thread of a store that gives blocks to the stores of other hosts."""

import logging
import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import zmq

from twofold.curve.guard import ENCRYPTION_BYTES, Guard
from twofold.serving.store.events import EventQueue
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import Block
from twofold.serving.store.peer_frames import MOST_KEYS, MOST_QUESTION_BYTES, Give, Given

log = logging.getLogger(__name__)

GONE_MS = (
    10_000  # a host that acknowledges nothing for so long is gone, and what was on its way to it is dropped
)


class Caller(NamedTuple):
    """A store that asks: its connection, and the number of its question."""

    connection: bytes
    number: int


class Wanted(NamedTuple):
    """A question of another store: these blocks, as far as they are here."""

    caller: Caller
    keys: list[bytes]


class Gift(NamedTuple):
    """Some more blocks of a question, by their index in it; `load` is what holds them until they are `Sent`."""

    load: int
    caller: Caller
    blocks: dict[int, Block]
    last: bool


class Sent(NamedTuple):
    """The slots of a gift are read no more."""

    gift: Gift


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
        self._questions = msgspec.msgpack.Decoder(Give)
        self._gifts: EventQueue[Gift | None] = EventQueue()
        self._said: EventQueue[Wanted | Sent] = EventQueue()
        self._thread = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._said.fileno()

    def take(self) -> Iterator[Wanted | Sent]:
        """What was asked, and what was sent, since this was asked last."""
        return self._said.drain()

    def give(self, gift: Gift) -> None:
        """Send blocks, which are held until they are `Sent`."""
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
        caller, keys = Caller(connection, question.number), question.keys
        if question.contents != self._contents:
            log.warning("the store of another host has blocks of another model or layout: it is given none")
            keys = []
        self._said.put(Wanted(caller, keys))

    def _send(self, gift: Gift) -> None:
        checksums = {index: block.checksum for index, block in gift.blocks.items()}
        given = Given(gift.caller.number, checksums, gift.last)
        slots = [self._memory.slot(block.slot) for block in gift.blocks.values()]
        self._socket.send_multipart([gift.caller.connection, msgspec.msgpack.encode(given), *slots])
        self._said.put(Sent(gift))
