"""vLLM's events of its prefix cache: what came and what went, in our names (vLLM 0.32, `distributed/kv_events.py`).

vLLM names a block by a hash that nobody else can compute. But an event of stored blocks has their tokens, and the hash
of the block before the first: from these follow the keys that prompts have here.
"""

from collections.abc import Sequence

import msgspec

from twofold.kvcache.prefix import next_key, root_key

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


class Changes(msgspec.Struct, frozen=True):
    """Keys of blocks that went and that came, in that order; `cleared`: all that were known went before."""

    cleared: bool = False
    removed: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode(payload: bytes) -> EventBatch:
    """Raises msgspec.MsgspecError on what is no batch of events."""
    return _decoder.decode(payload)


class KnownBlocks:
    """The blocks of one server's prefix cache, by vLLM's names and by ours."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys: dict[BlockHash, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def follow(self, batch: EventBatch) -> list[Changes]:
        """What a batch changed, in order."""
        return [self._change(event) for event in batch.events]

    def _change(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> Changes:
        if isinstance(event, AllBlocksCleared):
            self._keys.clear()
            return Changes(cleared=True)
        if isinstance(event, BlockRemoved):
            if event.medium not in _ENGINE or event.group_idx:
                return Changes()
            known = [self._keys.pop(each, None) for each in event.block_hashes]
            return Changes(removed=[key for key in known if key is not None])
        return Changes(stored=self._store(event))

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
