"""Messages between the processes of one worker: msgpack over a pipe that both have inherited, and nothing pickled."""

from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class TypedPipe(Generic[T]):
    """One end, which hears messages of one type (`hears`, a type or a union of them) only.

    `recv` raises EOFError when the other process has ended, and msgspec.ValidationError for anything else than it
    should hear. Both ends are of the same program, so nobody is expected to mend that.
    """

    def __init__(self, connection: Connection, hears: Any) -> None:  # noqa: ANN401  (a union has no type of its own)
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(hears)

    def send(self, message: object) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def recv(self) -> T:
        return self._decoder.decode(self.connection.recv_bytes())

    def poll(self, timeout_s: float) -> bool:
        """Whether something is there to be heard, or comes within that time."""
        return self.connection.poll(timeout_s)
