"""KV transport of a worker with several ranks. Each rank moves its own part of the KV cache.

The first rank sends requests to the other ranks, which reply with the number of bytes moved or an error.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection as Pipe
from operator import methodcaller

import msgspec

from twofold.engine.rank_link import RANK_HEARTBEAT_S
from twofold.engine.torch.pool import copy_blocks
from twofold.errors import InstanceLostError, TwofoldError
from twofold.transport.base import Connection, MemoryDescriptor, Transport
from twofold.transport.pooled import PooledTransport


class OtherRanks:
    """Pipes from the first rank of a worker to all other ranks. Methods are thread-safe."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._pipes = pipes
        self._lock = threading.Lock()  # held from request to replies
        self.addresses = tuple(str(pipe.recv()) for pipe in pipes)

    def ask(self, request: "RankRequest", meanwhile: Callable[[], int] = lambda: 0) -> int:
        """Execute a request on all ranks except this rank, and return the total number of bytes moved by all ranks.

        While the other ranks execute the request, the function `meanwhile` does this rank's part and returns the
        number of bytes moved. Raises the error of a failed rank.
        """
        with self._lock:
            for pipe in self._pipes:
                pipe.send(request)
            try:
                moved = meanwhile()
            finally:
                answers: list[int | TwofoldError] = [pipe.recv() for pipe in self._pipes]
        for answer in answers:  # after all ranks have replied
            if isinstance(answer, TwofoldError):
                raise answer
            moved += answer
        return moved


class ShardedConnection:
    """Connection of all ranks of a worker to a peer."""

    def __init__(self, ranks: OtherRanks, key: int, own: Connection) -> None:
        self._ranks, self._key, self._own = ranks, key, own

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return self._move(methodcaller("write", layers, source_blocks, target_blocks))

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return self._move(methodcaller("read", layers, source_blocks, target_blocks))

    def probe(self, nbytes: int) -> None:
        """Measure the link from the first rank only, because all ranks share it."""
        self._own.probe(nbytes)

    def close(self) -> None:
        self._ranks.ask(partial(RankServer.close, key=self._key))
        self._own.close()

    def _move(self, move: Callable[[Connection], int]) -> int:
        return self._ranks.ask(partial(RankServer.move, key=self._key, move=move), lambda: move(self._own))


class ShardedTransport(Transport):
    """KV transport of a worker with several ranks: in the first rank's process, it sends commands to the others."""

    def __init__(self, own: PooledTransport, ranks: OtherRanks) -> None:
        self.descriptor = msgspec.structs.replace(own.descriptor, others=ranks.addresses)
        self._own, self._ranks = own, ranks
        self._keys = 0

    def connect_to(self, peer: MemoryDescriptor) -> Connection:
        self._keys += 1
        own = self._own.connect(peer)
        connection = ShardedConnection(self._ranks, self._keys, own)
        try:
            self._ranks.ask(partial(RankServer.connect, key=self._keys, peer=peer))
        except TwofoldError:
            connection.close()
            raise
        return connection

    def publish(self, blocks: Sequence[int]) -> None:
        self._ranks.ask(partial(RankServer.publish, blocks=blocks))
        self._own.publish(blocks)


class RankServer:
    """Server of a rank other than rank 0. It moves KV of its rank when rank 0 requests it."""

    def __init__(self, own: PooledTransport, first: Pipe) -> None:
        self._own, self._first = own, first
        self._connections: dict[int, Connection] = {}
        self._first.send(own.descriptor.address)

    def start(self, heartbeat: Callable[[], None]) -> None:
        """Start a thread that executes the requests of rank 0, and calls `heartbeat` in between."""
        threading.Thread(target=self._serve, args=(heartbeat,), name="memory", daemon=True).start()

    def _serve(self, heartbeat: Callable[[], None]) -> None:
        while True:
            try:
                if self._first.poll(RANK_HEARTBEAT_S):
                    self._first.send(self._answer(self._first.recv()))
                heartbeat()
            except (EOFError, ConnectionError):
                return

    def _answer(self, request: "RankRequest") -> int | TwofoldError:
        try:
            return request(self) or 0
        except TwofoldError as error:
            return error

    def connect(self, key: int, peer: MemoryDescriptor) -> None:
        """Connect to a peer. `key` identifies the connection in later requests."""
        self._connections[key] = self._own.connect(peer)

    def move(self, key: int, move: Callable[[Connection], int]) -> int:
        """Copy KV blocks through a connection; return the number of bytes."""
        if key not in self._connections:
            raise InstanceLostError("the connection was closed")
        return move(self._connections[key])

    def close(self, key: int) -> None:
        """Close a connection, if there is one."""
        if key in self._connections:
            self._connections.pop(key).close()

    def publish(self, blocks: Sequence[int]) -> None:
        """Let peers read the given blocks."""
        self._own.publish(blocks)

    def copy_to_engine(self, block_lists: Sequence[Sequence[int]]) -> None:
        """Copy received blocks to the engine's pool."""
        landing, engine = self._own.landing_pool, self._own.engine_pool
        for blocks in block_lists:
            copy_blocks(landing, landing.layers, blocks, engine, blocks)


# A call of a method of the other ranks' servers, pickled for the pipe.
RankRequest = Callable[[RankServer], int | None]
