"""Mailboxes: every process has one inbox, and writes to the inboxes of others."""

import logging
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec
import zmq

from twofold.errors import ConfigurationError
from twofold.serving.messages import Message

M = TypeVar("M")

log = logging.getLogger(__name__)

# The longest message is a prompt's: at most 5 bytes a token, so this is room for thirteen million.
MAX_FRAME_BYTES = 64 * 1024 * 1024


class Inbox(Generic[M]):
    """Receives messages of the union `kind` at `address`, from one thread.

    What cannot be read as one is dropped and noted in the log, without its content; so is, by closing the connection
    that it comes over, what is longer than `max_frame_bytes`. `dropped` counts the former.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        kind: object,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.set_hwm(0)  # nothing is dropped or held up here; queues are bounded by admission
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigurationError(f"no socket can be made at {address}: {error.strerror}") from error
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self.address = address
        self.dropped = 0

    def receive(self, timeout_s: float) -> Iterator[M]:
        """Wait up to `timeout_s` for a message, then yield all that are there."""
        if self._socket.poll(int(timeout_s * 1000)):
            yield from self.drain()

    def drain(self) -> Iterator[M]:
        """Yield all messages that are there, without waiting."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._drop(frame, error)
                continue
            yield message

    def fileno(self) -> int:
        """Becomes readable when messages *arrive*: whoever is woken by it must `drain`."""
        return self._socket.getsockopt(zmq.FD)  # type: ignore[return-value]  # an int for this option

    def close(self) -> None:
        self._socket.close(linger=0)

    def _drop(self, frame: bytes, error: Exception) -> None:
        """Errors quote what they are about, so only their kind is told; of a flood, every power of two is."""
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:
            log.warning(
                "%s: a frame of %d bytes is no message (%s) and was dropped; %d so far",
                self.address,
                len(frame),
                type(error).__name__,
                self.dropped,
            )


class Outbox:
    """Sends messages to any inbox, from any thread, in order per thread and inbox."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._encoder = msgspec.msgpack.Encoder()
        self._local = threading.local()  # ZeroMQ sockets must stay with their thread

    def send(self, address: str, message: Message) -> None:
        """Queue a message; it never waits for the receiver. Raises ValueError for one that no inbox would take."""
        frame = self._encoder.encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            kind = type(message).__name__
            raise ValueError(f"a message of the kind {kind} has {len(frame)} bytes, more than an inbox takes")
        self._socket(address).send(frame)

    def forget(self, address: str) -> None:
        """Drop this thread's connection to an inbox that is gone."""
        socket = self._sockets().pop(address, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self, linger_s: float = 0.0) -> None:
        """Close this thread's connections, giving what is queued up to `linger_s` to leave."""
        for socket in self._sockets().values():
            socket.close(linger=int(linger_s * 1000))
        self._sockets().clear()

    def _sockets(self) -> dict[str, zmq.Socket[bytes]]:
        sockets: dict[str, zmq.Socket[bytes]] | None = getattr(self._local, "sockets", None)
        if sockets is None:
            sockets = self._local.sockets = {}
        return sockets

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        sockets = self._sockets()
        socket = sockets.get(address)
        if socket is None:
            socket = sockets[address] = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(address)
        return socket
