"""Mailboxes: every process has one inbox, and writes to the inboxes of others."""

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec
import zmq

from twofold.errors import ConfigurationError
from twofold.serving.messages import Message

M = TypeVar("M")


class Inbox(Generic[M]):
    """Receives messages of the union `kind` at `address`, from one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, kind: object) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)  # nothing is dropped or held up here; queues are bounded by admission
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigurationError(f"no socket can be made at {address}: {error.strerror}") from error
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self.address = address

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
            yield self._decoder.decode(frame)

    def fileno(self) -> int:
        """Becomes readable when messages *arrive*: whoever is woken by it must `drain`."""
        return self._socket.getsockopt(zmq.FD)  # type: ignore[return-value]  # an int for this option

    def close(self) -> None:
        self._socket.close(linger=0)


class Outbox:
    """Sends messages to any inbox, from any thread, in order per thread and inbox."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._encoder = msgspec.msgpack.Encoder()
        self._local = threading.local()  # ZeroMQ sockets must stay with their thread
        self._gone: list[str] = []  # each thread closes its own connections when it comes by

    def send(self, address: str, message: Message) -> None:
        """Queue a message; it never waits for the receiver."""
        self._socket(address).send(self._encoder.encode(message))

    def forget(self, address: str) -> None:
        """Drop the connections to an inbox that is gone for good: this thread's now, those of others as they send."""
        self._gone.append(address)
        self._drop_gone()

    def close(self, linger_s: float = 0.0) -> None:
        """Close this thread's connections, giving what is queued up to `linger_s` to leave."""
        for socket in self._sockets().values():
            socket.close(linger=int(linger_s * 1000))
        self._sockets().clear()

    def _sockets(self) -> dict[str, zmq.Socket[bytes]]:
        sockets: dict[str, zmq.Socket[bytes]] | None = getattr(self._local, "sockets", None)
        if sockets is None:
            sockets = self._local.sockets = {}
            self._local.dropped = len(self._gone)
        return sockets

    def _drop_gone(self) -> None:
        sockets = self._sockets()
        while self._local.dropped < len(self._gone):
            socket = sockets.pop(self._gone[self._local.dropped], None)
            self._local.dropped += 1
            if socket is not None:
                socket.close(linger=0)

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        self._drop_gone()
        sockets = self._sockets()
        socket = sockets.get(address)
        if socket is None:
            socket = sockets[address] = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(address)
        return socket
