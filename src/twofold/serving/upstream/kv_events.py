"""Translation of vLLM's KV cache events (vLLM 0.32, `distributed/kv_events.py`) to block keys."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.prefix import next_key, root_key
from twofold.serving.upstream.config import ServerConfig

log = logging.getLogger(__name__)

BlockHash = bytes | int
REPLAY_S = 5.0
_FRAMES = 3  # topic, number, events
_END = (-1).to_bytes(8, "big", signed=True)

# Engine memory; blocks in other media would have to be loaded first.
_ENGINE = ("GPU", None)


class _Event(msgspec.Struct, frozen=True, tag=True):
    """Base class of KV cache events. Unknown fields are ignored."""


class BlockStored(_Event, frozen=True):
    """Event: vLLM has cached consecutive blocks. `parent_block_hash` is None at the start of a prompt."""

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
        """Whether the blocks are in GPU memory, in the first KV cache group, and computed without LoRA."""
        return self.medium in _ENGINE and self.lora_name is None and not self.group_idx

    def salt(self) -> str | None:
        """Return the cache salt of the request, or "" if the request has no salt.

        Return None if the block hashes depend on more than the tokens of the prompt and the salt.
        """
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
    """KV cache events of one step of a vLLM engine."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode(payload: bytes) -> EventBatch:
    """Decode a batch of events. Raises msgspec.MsgspecError for malformed data."""
    return _decoder.decode(payload)


class CachedBlocks:
    """Mirrors a server's prefix cache in the router's prefix index by applying the server's KV events."""

    def __init__(self, instance: str, index: PrefixIndex, block_tokens: int) -> None:
        self._instance, self._index, self._block_tokens = instance, index, block_tokens
        self._keys: dict[BlockHash, bytes] = {}

    def follow(self, batch: EventBatch) -> None:
        """Apply the events of a batch in order."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.forget()
            elif isinstance(event, BlockStored):
                if stored := self._store(event):
                    self._index.stored(self._instance, stored)
            elif event.medium in _ENGINE and not event.group_idx:
                known = [self._keys.pop(each, None) for each in event.block_hashes]
                self._index.removed(self._instance, [key for key in known if key is not None])

    def forget(self) -> None:
        """Remove all blocks of the server from the index, after a cache reset or missed events."""
        self._keys.clear()
        self._index.lost(self._instance)

    def _store(self, event: BlockStored) -> list[bytes]:
        key = self._before(event)
        if key is None or event.block_size != self._block_tokens or not event.plain:
            return []  # unusable blocks, or an unknown parent
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


class EventFeed:
    """Receives the KV events of one server. It calls `on_events` with each batch, and `on_gap` if events were lost."""

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
        """Start receiving events. Requires a running event loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        assert self._config.events is not None  # noqa: S101  (feeds are created for servers with events)
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(self._config.events)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == _FRAMES:
                    await self._take(int.from_bytes(frames[1], "big"), frames[2])

    async def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:  # the server restarted
            self._on_gap()
            self._next = 0
        if number > self._next:
            await self._catch_up(number)
        if number >= self._next:
            self._read(number, payload)

    async def _catch_up(self, number: int) -> None:
        missed = [] if self._config.replay is None else await self._replayed(self._config.replay)
        for each, payload in missed:
            if self._next == each < number:
                self._read(each, payload)
        if self._next < number:
            log.info("%s: events %d to %d were missed", self._config.instance, self._next, number - 1)
            self._on_gap()

    async def _replayed(self, address: str) -> list[tuple[int, bytes]]:
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
                log.warning("%s: no replay of events from %s", self._config.instance, address)
        return found

    def _read(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            batch = decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("%s published invalid KV events: %s", self._config.instance, error)
            self._on_gap()
            return
        self._on_events(batch)
