"""Pipes between the ranks of a worker, heartbeats by which rank 0 detects hung ranks, and the progress of all ranks."""

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import msgspec

from twofold.engine.base import OnLayer

M = TypeVar("M")

RANK_HEARTBEAT_S = 0.2
RANK_TIMEOUT_S = 2.0  # a rank without a heartbeat for this long hangs


class TypedPipe(Generic[M]):
    """One end of a pipe for typed messages. `recv` raises EOFError if the other process has exited."""

    def __init__(self, connection: Connection, receives: Any) -> None:  # noqa: ANN401  (a type or a union)
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(receives)

    def send(self, message: object) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def recv(self) -> M:
        return self._decoder.decode(self.connection.recv_bytes())  # raises msgspec.ValidationError for another type


class RankHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a rank, sent to rank 0."""


class RankLinks:
    """Rank 0's pipes to the other ranks of a worker, which receive messages of type `receives`.

    A thread calls `handle` with the index of a pipe and each message. The process ends when another rank exits.
    """

    def __init__(self, pipes: Sequence[Connection], receives: Any, handle: Callable[[int, Any], None]) -> None:  # noqa: ANN401  (a type or a union)
        self._others = {pipe: (place, TypedPipe[Any](pipe, receives)) for place, pipe in enumerate(pipes)}
        self._heard_s = dict.fromkeys(pipes, time.monotonic())
        self._handle = handle
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def alive(self) -> bool:
        """Return whether no other rank has been silent for `RANK_TIMEOUT_S` seconds or longer."""
        return time.monotonic() - min(self._heard_s.values()) < RANK_TIMEOUT_S

    def send(self, message: object) -> None:
        for _, other in self._others.values():
            other.send(message)

    def _listen(self) -> None:
        while True:
            for pipe in wait(list(self._others)):
                assert isinstance(pipe, Connection)  # noqa: S101  (for the type checker)
                place, other = self._others[pipe]
                message = other.recv()  # raises if the rank has exited
                self._heard_s[pipe] = time.monotonic()
                self._handle(place, message)


class FirstRankLink(TypedPipe[M]):
    """Pipe of another rank to rank 0. `send` and `heartbeat` are thread-safe."""

    def __init__(self, first: Connection, receives: Any) -> None:  # noqa: ANN401  (a type or a union)
        super().__init__(first, receives)
        self._lock = threading.Lock()
        self._heartbeat_s = 0.0

    def send(self, message: object) -> None:
        with self._lock:
            super().send(message)

    def heartbeat(self) -> None:
        """Send a heartbeat to rank 0, at most once every `RANK_HEARTBEAT_S` seconds."""
        now = time.monotonic()
        if now - self._heartbeat_s >= RANK_HEARTBEAT_S:
            self._heartbeat_s = now
            self.send(RankHeartbeat())


class LayerProgress:
    """Calls `on_layer` for each layer in order, once all tensor shards have computed the layer. Thread-safe."""

    def __init__(self, num_layers: int, shards: int, on_layer: OnLayer) -> None:
        self._shards = shards
        self._on_layer = on_layer
        self._computed = [0] * num_layers
        self._complete = 0
        self._lock = threading.Lock()

    def computed(self, layer: int) -> None:
        """Record that one rank has computed its part of a layer."""
        with self._lock:
            self._computed[layer] += 1
            while self._complete < len(self._computed) and self._computed[self._complete] == self._shards:
                self._announce()

    def finish(self) -> None:
        """Call `on_layer` for the remaining layers at the end of an iteration."""
        with self._lock:  # not all `LayerDone` messages may have arrived
            while self._complete < len(self._computed):
                self._announce()

    def _announce(self) -> None:
        self._on_layer(self._complete)
        self._complete += 1
