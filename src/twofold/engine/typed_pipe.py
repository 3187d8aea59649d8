"""Typed messages between the processes of one worker: msgpack over an inherited pipe."""

from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class TypedPipe(Generic[T]):
    """One end of a pipe for typed messages. `recv` raises EOFError if the other process has exited."""

    def __init__(self, connection: Connection, receives: Any) -> None:  # noqa: ANN401  (a type or a union)
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    def send(self, message: object) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def recv(self) -> T:
        return self._decoder.decode(self.connection.recv_bytes())  # raises msgspec.ValidationError for another type
