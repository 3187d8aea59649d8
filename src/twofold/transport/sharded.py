"""The cache of a split worker: each of its ranks moves its own part, and the first rank tells the others when.

first rank                                      another rank
SplitConnection.write(layers, …) ── Move ─────▶ RankMemory: its own connection.write(layers, …)
  its own part meanwhile                          copies its heads of these layers
  bytes of all ◀───────────────── bytes moved ──  or the error that kept it from that
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import Final

import msgspec

from twofold.engine.torch.pool import copy_all_layers
from twofold.engine.typed_pipe import TypedPipe
from twofold.errors import ConfigurationError, InstanceLostError, StaleEpochError, TwofoldError
from twofold.handoff import Lease
from twofold.transport.base import Connection, MemoryDescriptor
from twofold.transport.pooled import PooledTransport


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Open the cache of a peer; `key` names the connection from now on."""

    key: int
    peer: MemoryDescriptor


class MoveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Move what this rank has, or is to have, of layers `first` to `end` (less that one): into the peer's cache if it
    `writes`."""

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
    """Close a connection, if there is one of this key."""

    key: int


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Make these blocks readable for peers."""

    blocks: Sequence[int]


class CopyToEngine(msgspec.Struct, frozen=True, tag=True):
    """Bring these blocks from where they landed to where the engine computes."""

    block_lists: Sequence[Sequence[int]]


RankRequest = Connect | MoveBlocks | Close | Publish | CopyToEngine


class RankAddress(msgspec.Struct, frozen=True, tag=True):
    """The first thing that a rank says: where its memory is."""

    address: str


class BytesMoved(msgspec.Struct, frozen=True, tag=True):
    """Bytes; 0 where there was nothing to move."""

    nbytes: int


class RankError(msgspec.Struct, frozen=True, tag=True):
    """What went wrong on the rank: the name of an error, and its words."""

    error: str
    reason: str

    @classmethod
    def of(cls, error: TwofoldError) -> "RankError":
        return cls(type(error).__name__, str(error))

    def again(self) -> TwofoldError:
        """The error, to be raised here."""
        return _ERRORS.get(self.error, TwofoldError)(self.reason)


RankReply = RankAddress | BytesMoved | RankError
_ERRORS: Final = {error.__name__: error for error in (ConfigurationError, InstanceLostError, StaleEpochError)}


class _Other:
    """Another rank, as the first sees it. The address of its memory is the first thing that it says."""

    def __init__(self, pipe: Pipe) -> None:
        self.lock = threading.Lock()  # held from a request to its answer
        self.pipe = TypedPipe[RankReply](pipe, RankReply)
        told = self.pipe.recv()
        assert isinstance(told, RankAddress)  # noqa: S101  (it says nothing else first; tells the type checker)
        self.address = told.address


class OtherRanks:
    """The ranks of this worker but the first. Its methods may be called from any thread."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._others = [_Other(pipe) for pipe in pipes]
        self.addresses = tuple(other.address for other in self._others)

    def ask(self, request: RankRequest, meanwhile: Callable[[], int] = lambda: 0) -> int:
        """The bytes that all of them moved, and what we did `meanwhile`.

        Raises what went wrong anywhere, and then as well nothing is being moved any more.
        """
        with ExitStack() as stack:
            for other in self._others:  # in one order, so that two threads cannot wait for each other
                stack.enter_context(other.lock)
            for other in self._others:
                other.pipe.send(request)
            try:
                moved = meanwhile()
            finally:
                answers = [other.pipe.recv() for other in self._others]
        for answer in answers:
            if isinstance(answer, RankError):
                raise answer.again()
            if isinstance(answer, BytesMoved):
                moved += answer.nbytes
        return moved


class ShardedConnection:
    """Implements `Connection` for all ranks together; `own` is that of the first."""

    def __init__(self, ranks: OtherRanks, key: int, own: Connection) -> None:
        self._ranks, self._key, self._own = ranks, key, own

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return self._move(layers, source_blocks, target_blocks, writes=True)

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return self._move(layers, source_blocks, target_blocks, writes=False)

    def probe(self, nbytes: int) -> None:
        """The way of one rank: the others have the same."""
        self._own.probe(nbytes)

    def close(self) -> None:
        self._ranks.ask(Close(self._key))
        self._own.close()

    def _move(
        self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int], *, writes: bool
    ) -> int:
        move = MoveBlocks(self._key, writes, layers.start, layers.stop, source_blocks, target_blocks)
        return self._ranks.ask(move, lambda: move.through(self._own))


class ShardedTransport:
    """Implements `Transport` on the first rank of a split worker; `own` is what it has of the cache."""

    writes_outlive_lease = False

    def __init__(self, own: PooledTransport, ranks: OtherRanks) -> None:
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

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        """There are none of blocks that are divided: a service with such workers is not told to compare any."""

    def granted(self, lease: Lease) -> None:
        self._own.granted(lease)

    def ended(self, lease: Lease) -> None:
        self._own.ended(lease)

    def close(self) -> None:
        self._own.close()


class RankServer:
    """What another rank has of the cache: does with it what the first rank asks for."""

    def __init__(self, own: PooledTransport, first: Pipe) -> None:
        self._own, self._first = own, TypedPipe[RankRequest](first, RankRequest)
        self._connections: dict[int, Connection] = {}
        self._first.send(RankAddress(own.descriptor.address))

    def serve(self, beat: Callable[[], None], beat_s: float) -> None:
        """Until the first rank has ended; `beat` is called at least every `beat_s` unless something takes longer."""
        while True:
            try:
                if self._first.poll(beat_s):
                    self._first.send(self._answer(self._first.recv()))
                beat()
            except (EOFError, ConnectionError):
                return

    def _answer(self, request: RankRequest) -> RankReply:
        try:
            return BytesMoved(self._do(request))
        except TwofoldError as error:
            return RankError.of(error)

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
