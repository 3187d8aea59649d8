"""Messages between processes over ZeroMQ. Each process receives with one Inbox and sends with one Outbox."""

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

# Prompts are the longest messages: at most 5 bytes a token, so this is enough for 13 million tokens.
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_SOCKETS = 32_768


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a ZeroMQ context for up to `MAX_SOCKETS` sockets; ZeroMQ's default limit is 1,023."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Header of a message between hosts, with a sequence number that reveals lost messages."""

    sender: str
    stream: int
    number: int


class Inbox(Generic[M]):
    """Receiver of all messages to one process, for use in one thread.

    Malformed messages are dropped. `outside` is a second address, for senders on other hosts. With a `guard`, messages
    are encrypted, and `on_lost` is called with the name of a sender whose message was lost.
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
        self._socket.set_hwm(0)  # unlimited: admission bounds the queues
        if guard is not None:
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + ENCRYPTION_BYTES)
            guard.listen(self._socket, outside or address)
        self.address = self._bind(address)
        self.outside = None if outside is None else self._bind(outside)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._stamps = None if guard is None else msgspec.msgpack.Decoder(Stamp)
        self._next: dict[str, tuple[int, int]] = {}  # stream and next number by sender
        self._on_lost = on_lost
        self.dropped = 0

    def receive(self, timeout_s: float) -> Iterator[M]:
        """Wait up to `timeout_s` for a message, then yield all available messages."""
        if self._socket.poll(int(timeout_s * 1000)):
            yield from self.drain()

    def drain(self) -> Iterator[M]:
        """Yield all available messages without waiting."""
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
        """Return a file descriptor that becomes readable when messages arrive."""
        return self._socket.getsockopt(zmq.FD)  # type: ignore[return-value]  # an int for this option

    def close(self) -> None:
        self._socket.close(linger=0)

    def _bind(self, address: str) -> str:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigurationError(f"cannot bind a socket to {address}: {error.strerror}") from error
        return self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]

    def _unstamped(self, frames: list[bytes]) -> bytes:
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
        self.dropped += 1
        # Without the content of the frame, and for only few of many frames.
        if self.dropped & (self.dropped - 1) == 0:
            log.warning(
                "%s: dropped a malformed frame of %d bytes (%s); %d dropped so far",
                self.address,
                sum(map(len, frames)),
                type(error).__name__,
                self.dropped,
            )


class Outbox:
    """Thread-safe sender of messages to inboxes. Messages are encrypted if `guard` is set."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], guard: Guard | None = None, sender: str = "") -> None:
        self._context, self._guard, self._sender = context, guard, sender
        self._encoder = msgspec.msgpack.Encoder()
        self._last: tuple[Message | None, bytes] = (None, b"")  # the last message and its frame
        self._connections: dict[str, _Connection] = {}
        self._lock = threading.Lock()  # a ZeroMQ socket may be used by one thread at a time

    def send(self, address: str, message: Message) -> None:
        """Queue a message for the inbox at `address` without waiting. Raises ValueError if the message is too long."""
        frame = self._frame_of(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(
                f"{type(message).__name__} has {len(frame)} bytes, more than the limit of {MAX_FRAME_BYTES}"
            )
        with self._lock:
            connection = self._connections.get(address) or self._open(address)
            try:
                self._put(connection, frame)
            except zmq.Again:
                # ZeroMQ never reconnects after a protocol error, for example when another server had this address.
                # The receiver finds out by the number of the next message whether messages were lost.
                connection.socket.close(linger=0)
                connection.socket = self._connect(address)
                self._put(connection, frame)
            connection.sent += 1

    def _put(self, connection: "_Connection", frame: bytes) -> None:
        if self._guard is not None:
            stamp = Stamp(self._sender, connection.stream, connection.sent)
            connection.socket.send(self._encoder.encode(stamp), zmq.SNDMORE | zmq.NOBLOCK)
        connection.socket.send(frame, zmq.NOBLOCK)

    def _frame_of(self, message: Message) -> bytes:
        last, frame = self._last  # the same message may go to several inboxes
        if last is not message:
            frame = msgspec.msgpack.encode(message)
            self._last = message, frame
        return frame

    def forget(self, address: str) -> None:
        """Close the connection to an inbox that no longer exists, and discard its queued messages."""
        with self._lock:
            connection = self._connections.pop(address, None)
            if connection is not None:
                connection.socket.close(linger=0)

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections. ZeroMQ continues to send queued messages for up to `linger_s` seconds."""
        with self._lock:
            for connection in self._connections.values():
                connection.socket.close(linger=int(linger_s * 1000))
            self._connections.clear()

    def _open(self, address: str) -> "_Connection":
        connection = self._connections[address] = _Connection(self._connect(address), secrets.randbits(63))
        return connection

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self._guard is not None:
            self._guard.call(socket, address)
        socket.connect(address)
        return socket


class _Connection:
    def __init__(self, socket: zmq.Socket[bytes], stream: int) -> None:
        self.socket, self.stream = socket, stream
        self.sent = 0
