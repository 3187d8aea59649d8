"""Mailboxes: every process has one inbox, and writes to the inboxes of others."""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec
import zmq

from twofold.errors import ConfigurationError
from twofold.security.guard import ENCRYPTION_BYTES, Guard
from twofold.serving.messages import Message

M = TypeVar("M")

log = logging.getLogger(__name__)

# The longest message is a prompt's: at most 5 bytes a token, so this is room for thirteen million.
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_SOCKETS = 32_768


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """For a process that writes to the inboxes of a fleet: ZeroMQ's own limit is 1,023 sockets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What goes in front of a message between hosts: who sent it, and how many went the same way before it.

    A connection that breaks takes what is under way with it. The next one says so: `number` jumps. `stream` is another
    each time somebody begins to send.
    """

    sender: str
    stream: int
    number: int


class Inbox(Generic[M]):
    """Receives messages of the union `kind` at `address`, from one thread.

    What cannot be read as one is dropped and noted in the log, without its content; so is, by closing the connection
    that it comes over, what is longer than `max_frame_bytes`. `dropped` counts the former.

    With a `guard` only those who have its key are heard, and others hosts may call too, at `outside`, as in
    tcp://ADDRESS:PORT (`*` takes a free port). Messages are stamped then, and `on_lost(sender)` is called, from the
    thread that receives, when some of a sender's did not come.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        kind: object,
        *,
        guard: Guard | None = None,
        outside: str | None = None,
        on_lost: Callable[[str], None] = lambda _sender: None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.set_hwm(0)  # nothing is dropped or held up here; queues are bounded by admission
        if guard is not None:
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + ENCRYPTION_BYTES)
            guard.listen(self._socket, outside or address)
        self.address = self._bind(address)
        self.outside = None if outside is None else self._bind(outside)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._stamps = None if guard is None else msgspec.msgpack.Decoder(Stamp)
        self._next: dict[
            str, tuple[int, int]
        ] = {}  # by sender: its stream, and the number that comes next in it
        self._on_lost = on_lost
        self.dropped = 0

    def receive(self, timeout_s: float) -> Iterator[M]:
        """Wait up to `timeout_s` for a message, then yield all that are there."""
        if self._socket.poll(int(timeout_s * 1000)):
            yield from self.drain()

    def drain(self) -> Iterator[M]:
        """Yield all messages that are there, without waiting."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(self._unstamped(frames))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
                self._drop(frames, error)
                continue
            yield message

    def fileno(self) -> int:
        """Becomes readable when messages *arrive*: whoever is woken by it must `drain`."""
        return self._socket.getsockopt(zmq.FD)  # type: ignore[return-value]  # an int for this option

    def close(self) -> None:
        self._socket.close(linger=0)

    def _bind(self, address: str) -> str:
        """The address that it is bound to, with a port where one was to be found."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigurationError(f"no socket can be made at {address}: {error.strerror}") from error
        return self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]

    def _unstamped(self, frames: list[bytes]) -> bytes:
        """The message alone. Raises ValueError where there is anything else, or no stamp where there must be one."""
        if self._stamps is None:
            (message,) = frames
            return message
        stamped, message = frames
        stamp = self._stamps.decode(stamped)
        stream, number = self._next.get(stamp.sender, (stamp.stream, 0))
        expected = number if stream == stamp.stream else 0
        self._next[stamp.sender] = (stamp.stream, stamp.number + 1)
        if stamp.number != expected:
            self._on_lost(stamp.sender)
        return message

    def _drop(self, frames: list[bytes], error: Exception) -> None:
        """Errors quote what they are about, so only their kind is told; of a flood, every power of two is."""
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:
            log.warning(
                "%s: a frame of %d bytes is no message (%s) and was dropped; %d so far",
                self.address,
                sum(map(len, frames)),
                type(error).__name__,
                self.dropped,
            )


class Outbox:
    """Sends messages to any inbox, from any thread, in order for each inbox.

    With a `guard` it shows the guard's key, and stamps what it sends as `sender`'s.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], guard: Guard | None = None, sender: str = ""
    ) -> None:
        self._context, self._guard, self._sender = context, guard, sender
        self._encoder = msgspec.msgpack.Encoder()
        self._last: tuple[Message | None, bytes] = (None, b"")  # what was sent last, and its frame
        self._ways: dict[str, _Way] = {}
        self._lock = threading.Lock()  # ZeroMQ sockets may change threads, but are one thread's at a time

    def send(self, address: str, message: Message) -> None:
        """Queue a message; it never waits for the receiver. Raises ValueError for one that no inbox would take."""
        frame = self._frame_of(message)
        if len(frame) > MAX_FRAME_BYTES:
            kind = type(message).__name__
            raise ValueError(f"a message of the kind {kind} has {len(frame)} bytes, more than an inbox takes")
        with self._lock:
            way = self._ways.get(address) or self._open(address)
            if self._guard is not None:
                stamp = Stamp(self._sender, way.stream, way.sent)
                way.socket.send(self._encoder.encode(stamp), zmq.SNDMORE)
            way.socket.send(frame)
            way.sent += 1

    def _frame_of(self, message: Message) -> bytes:
        """What is told to many, one after the other, is encoded once: `Peers` is as long as they are many."""
        last, frame = self._last
        if last is not message:
            frame = msgspec.msgpack.encode(message)
            self._last = message, frame
        return frame

    def forget(self, address: str) -> None:
        """Drop the connection to an inbox that is gone for good, and what was still to be sent to it."""
        with self._lock:
            way = self._ways.pop(address, None)
            if way is not None:
                way.socket.close(linger=0)

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections, giving what is queued up to `linger_s` to leave."""
        with self._lock:
            for way in self._ways.values():
                way.socket.close(linger=int(linger_s * 1000))
            self._ways.clear()

    def _open(self, address: str) -> "_Way":
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self._guard is not None:
            self._guard.call(socket, address)
        socket.connect(address)
        way = self._ways[address] = _Way(socket, secrets.randbits(63))
        return way


class _Way:
    """A connection to one inbox."""

    def __init__(self, socket: zmq.Socket[bytes], stream: int) -> None:
        self.socket, self.stream = socket, stream
        self.sent = 0
