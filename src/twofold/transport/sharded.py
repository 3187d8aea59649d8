"""KV transport of a worker with several ranks. Each rank moves its own part of the KV cache.

The first rank sends requests to the other ranks, which reply with the number of bytes moved or an error.
"""

import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Final

import msgspec

from twofold.engine.torch.pool import copy_all_layers
from twofold.engine.typed_pipe import TypedPipe
from twofold.errors import ConfigurationError, InstanceLostError, StaleEpochError, TwofoldError
from twofold.transport.base import Connection, MemoryDescriptor, Transport
from twofold.transport.shared_memory import SharedMemoryTransport


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Request to connect to a peer. `key` identifies the connection in later requests."""

    key: int
    peer: MemoryDescriptor


class MoveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Request to copy KV blocks to a peer (if `writes` is true) or from a peer (otherwise).

    The copied layers are `first` to `end` − 1.
    """

    key: int
    writes: bool
    first: int
    end: int
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]

    def through(self, connection: Connection) -> int:
        move = connection.write if self.writes else connection.read
        return move(range(self.first, self.end), self.source_blocks, self.target_blocks)


class Close(msgspec.Struct, frozen=True, tag=True):
    """Request to close a connection."""

    key: int


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Request to let peers read the given blocks."""

    blocks: Sequence[int]


class CopyToEngine(msgspec.Struct, frozen=True, tag=True):
    """Request to copy received blocks to the engine's pool."""

    block_lists: Sequence[Sequence[int]]


RankRequest = Connect | MoveBlocks | Close | Publish | CopyToEngine


class RankAddress(msgspec.Struct, frozen=True, tag=True):
    """Memory address of a rank, sent to the first rank at start-up."""

    address: str


class BytesMoved(msgspec.Struct, frozen=True, tag=True):
    """Reply of a rank that executed a request: the number of bytes moved."""

    nbytes: int


class RankError(msgspec.Struct, frozen=True, tag=True):
    """Reply of a rank that failed to execute a request."""

    error: str
    reason: str


RankReply = RankAddress | BytesMoved | RankError
_ERRORS: Final = {error.__name__: error for error in (ConfigurationError, InstanceLostError, StaleEpochError)}


class OtherRanks:
    """Pipes from the first rank of a worker to all other ranks. Methods are thread-safe."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._others = [TypedPipe[RankReply](pipe, RankReply) for pipe in pipes]
        self._lock = threading.Lock()  # held from request to replies
        first = [other.recv() for other in self._others]
        self.addresses = tuple(message.address for message in first if isinstance(message, RankAddress))

    def ask(self, request: RankRequest, meanwhile: Callable[[], int] = lambda: 0) -> int:
        """Execute a request on all ranks except this rank, and return the total number of bytes moved by all ranks.

        While the other ranks execute the request, the function `meanwhile` does this rank's part and returns the
        number of bytes moved. Raises the error of a failed rank.
        """
        with self._lock:
            for other in self._others:
                other.send(request)
            try:
                moved = meanwhile()
            finally:
                answers = [other.recv() for other in self._others]
        for answer in answers:  # after all ranks have replied
            if isinstance(answer, RankError):
                raise _ERRORS.get(answer.error, TwofoldError)(answer.reason)
            if isinstance(answer, BytesMoved):
                moved += answer.nbytes
        return moved


class ShardedConnection:
    """Connection of all ranks of a worker to a peer."""

    def __init__(self, ranks: OtherRanks, key: int, own: Connection) -> None:
        self._ranks, self._key, self._own = ranks, key, own

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return self._move(layers, source_blocks, target_blocks, writes=True)

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return self._move(layers, source_blocks, target_blocks, writes=False)

    def probe(self, nbytes: int) -> None:
        """Measure the link from the first rank only, because all ranks share it."""
        self._own.probe(nbytes)

    def close(self) -> None:
        self._ranks.ask(Close(self._key))
        self._own.close()

    def _move(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int], *, writes: bool) -> int:
        move = MoveBlocks(self._key, writes, layers.start, layers.stop, source_blocks, target_blocks)
        return self._ranks.ask(move, lambda: move.through(self._own))


class ShardedTransport(Transport):
    """KV transport of a worker with several ranks. The transport runs in the first rank's process and
    sends commands to the other ranks.
    """

    def __init__(self, own: SharedMemoryTransport, ranks: OtherRanks) -> None:
        self.descriptor = msgspec.structs.replace(own.descriptor, others=ranks.addresses)
        self._own, self._ranks = own, ranks
        self._keys = 0

    def connect(self, peer: MemoryDescriptor) -> Connection:
        self._keys += 1
        own = self._own.connect(peer)
        connection = ShardedConnection(self._ranks, self._keys, own)
        try:
            self._ranks.ask(Connect(self._keys, peer))
        except TwofoldError:
            connection.close()
            raise
        return connection

    def publish(self, blocks: Sequence[int]) -> None:
        self._ranks.ask(Publish(blocks))
        self._own.publish(blocks)


class RankServer:
    """Server of a rank other than rank 0. It moves KV of its rank when rank 0 requests it."""

    def __init__(self, own: SharedMemoryTransport, first: Pipe) -> None:
        self._own, self._first = own, TypedPipe[RankRequest](first, RankRequest)
        self._connections: dict[int, Connection] = {}
        self._first.send(RankAddress(own.descriptor.address))

    def serve(self, beat: Callable[[], None], beat_s: float) -> None:
        """Execute the requests that rank 0 sends, until rank 0 exits.

        Calls the heartbeat function `beat` at least every `beat_s` seconds.
        """
        while True:
            try:
                if self._first.connection.poll(beat_s):
                    self._first.send(self._answer(self._first.recv()))
                beat()
            except (EOFError, ConnectionError):
                return

    def _answer(self, request: RankRequest) -> RankReply:
        try:
            return BytesMoved(self._do(request))
        except TwofoldError as error:
            return RankError(type(error).__name__, str(error))

    def _do(self, request: RankRequest) -> int:
        match request:
            case Connect(key=key, peer=peer):
                self._connections[key] = self._own.connect(peer)
            case MoveBlocks(key=key):
                if key not in self._connections:
                    raise InstanceLostError("the connection was closed")
                return request.through(self._connections[key])
            case Close(key=key):
                if key in self._connections:
                    self._connections.pop(key).close()
            case Publish(blocks=blocks):
                self._own.publish(blocks)
            case CopyToEngine(block_lists=block_lists):
                for blocks in block_lists:
                    copy_all_layers(self._own.landing_pool, self._own.engine_pool, blocks)
        return 0
