"""vLLM's events of its prefix cache: what came and what went, in our names (vLLM 0.32, `distributed/kv_events.py`).

vLLM names a block by a hash that nobody else can compute. But an event of stored blocks has their tokens, and the hash
of the block before the first: from these follow the keys that prompts have here.

The events of one server's prefix cache, in order, over ZeroMQ; what was missed is asked for again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from twofold.kvcache.prefix import next_key, root_key
from twofold.serving.upstream.config import ServerConfig

BlockHash = bytes | int

# Memory that an engine computes on; blocks in others would have to be loaded.
_ENGINE = ("GPU", None)


class _Event(msgspec.Struct, frozen=True, tag=True):
    """Fields that are not named here are ignored."""


class BlockStored(_Event, frozen=True):
    """Blocks one after the other, the first of them after `parent_block_hash`, or at the beginning of a prompt."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None

    @property
    def plain(self) -> bool:
        """Text for the model alone, in the engine's memory; of a model with layers of several kinds, the first kind."""
        return self.medium in _ENGINE and self.lora_name is None and not self.group_idx

    def salt(self) -> str | None:
        """The `cache_salt` of a prompt that begins here; None where other things than text are in its hash."""
        extra = (self.extra_keys or [None])[0] or []
        if not extra:
            return ""
        return extra[0] if len(extra) == 1 and isinstance(extra[0], str) else None


class BlockRemoved(_Event, frozen=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(_Event, frozen=True):
    pass


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step of an engine changed."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class CacheChanges(msgspec.Struct, frozen=True):
    """Keys of blocks that went and that came, in that order; `cleared`: all that were known went before."""

    cleared: bool = False
    removed: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode(payload: bytes) -> EventBatch:
    """Raises msgspec.MsgspecError on what is no batch of events."""
    return _decoder.decode(payload)


class BlockKeyMap:
    """The blocks of one server's prefix cache, by vLLM's names and by ours."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys: dict[BlockHash, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def follow(self, batch: EventBatch) -> list[CacheChanges]:
        """What a batch changed, in order."""
        return [self._change(event) for event in batch.events]

    def _change(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> CacheChanges:
        if isinstance(event, AllBlocksCleared):
            self._keys.clear()
            return CacheChanges(cleared=True)
        if isinstance(event, BlockRemoved):
            if event.medium not in _ENGINE or event.group_idx:
                return CacheChanges()
            known = [self._keys.pop(each, None) for each in event.block_hashes]
            return CacheChanges(removed=[key for key in known if key is not None])
        return CacheChanges(stored=self._store(event))

    def _store(self, event: BlockStored) -> list[bytes]:
        """Nothing where the blocks are not ours to use, or come after one that nobody told us of."""
        key = self._before(event)
        if key is None or event.block_size != self._block_tokens or not event.plain:
            return []
        stored, size = [], event.block_size
        for number, name in enumerate(event.block_hashes):
            key = self._keys[name] = next_key(key, event.token_ids[number * size : (number + 1) * size])
            stored.append(key)
        return stored

    def _before(self, event: BlockStored) -> bytes | None:
        if event.parent_block_hash is not None:
            return self._keys.get(event.parent_block_hash)
        salt = event.salt()
        return None if salt is None else root_key(salt.encode())


log = logging.getLogger(__name__)

REPLAY_S = 5.0
_FRAMES = 3  # topic, number, events
_END = (-1).to_bytes(8, "big", signed=True)


class EventFeed:
    """Follows a server from `start` to `stop`. `on_events` gets each batch, `on_gap` is called where some are lost.

    Batches are numbered from 0 on in each life of a server. A feed that begins in the middle, or misses some, asks
    `replay` for them; without it the blocks of which nothing was heard are not known.
    """

    def __init__(
        self,
        config: ServerConfig,
        context: "zmq.asyncio.Context",
        on_events: Callable[[EventBatch], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._config, self._context = config, context
        self._on_events, self._on_gap = on_events, on_gap
        self._next = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """To be called inside the running event loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        assert self._config.events is not None  # noqa: S101  (there is no feed without)
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(self._config.events)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == _FRAMES:
                    await self._take(int.from_bytes(frames[1], "big"), frames[2])

    async def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:  # it was started again
            self._on_gap()
            self._next = 0
        if number > self._next:
            await self._catch_up(number)
        if number >= self._next:
            self._read(number, payload)

    async def _catch_up(self, number: int) -> None:
        """Have the batches before this one; where some cannot be had, what was known may be wrong."""
        missed = [] if self._config.replay is None else await self._replayed(self._config.replay)
        for each, payload in missed:
            if self._next == each < number:
                self._read(each, payload)
        if self._next < number:
            log.info("%s: events %d to %d were missed", self._config.instance, self._next, number - 1)
            self._on_gap()

    async def _replayed(self, address: str) -> list[tuple[int, bytes]]:
        """What the server still has of the batches from the next one on."""
        found: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            try:
                async with asyncio.timeout(REPLAY_S):
                    await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
                    while (frames := await socket.recv_multipart())[-2] != _END:
                        found.append((int.from_bytes(frames[-2], "big"), frames[-1]))
            except TimeoutError:
                log.warning("%s does not repeat events at %s", self._config.instance, address)
        return found

    def _read(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            batch = decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("%s publishes something else than KV events: %s", self._config.instance, error)
            self._on_gap()
            return
        self._on_events(batch)
