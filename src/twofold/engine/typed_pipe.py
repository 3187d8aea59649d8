"""Typed messages between the processes of one worker: msgpack over an inherited pipe."""

from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class TypedPipe(Generic[T]):
    """One end of a pipe, which receives messages of one type or of a union of types.

    `recv` raises EOFError if the other process has exited, and msgspec.ValidationError for a message of another type.
    """

    def __init__(self, connection: Connection, receives: Any) -> None:  # noqa: ANN401  (a type or a union)
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    def send(self, message: object) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def recv(self) -> T:
        return self._decoder.decode(self.connection.recv_bytes())
