"""Which blocks of prompts vLLM has cached, under the names by which the service knows them."""

from collections import Counter
from collections.abc import Sequence

from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, EventPublisher, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from twofold.kvcache.watcher import CacheWatcher, Removal
from twofold.request import BlockKey

ExternalHash = int | bytes


class PromptBlocks(EventPublisher):
    """Stands where vLLM publishes its KV events. vLLM names a block by a hash of its own, over the same tokens.

    So the blocks of a prompt have two names each, which are told when it comes. Blocks of output, and those of prompts
    whose KV comes from a peer, have only vLLM's, and are passed over.
    """

    def __init__(self) -> None:
        super().__init__()
        self._expected: dict[str, list[ExternalHash]] = {}
        self._names: dict[ExternalHash, BlockKey] = {}  # of blocks that are cached, or may yet be
        self._wanted: Counter[ExternalHash] = Counter()  # by how many requests, and blocks, a name is known
        self._cached: Counter[ExternalHash] = Counter()
        self._changes: list[tuple[BlockKey, bool]] = []

    def expect(self, request_id: str, hashes: Sequence[BlockHash], keys: Sequence[BlockKey]) -> None:
        """A prompt has come, whose full blocks are these, by either name."""
        named = [maybe_convert_block_hash(each) for each in hashes[: len(keys)]]
        self._expected[request_id] = named
        self._names.update(zip(named, keys, strict=False))
        self._wanted.update(named)

    def forget(self, request_id: str) -> None:
        """It has ended: what it has left in the cache keeps its name."""
        for each in self._expected.pop(request_id, ()):
            self._release(each)

    def publish(self, events: EventBatch) -> None:
        for event in events.events if isinstance(events, KVEventBatch) else ():
            if isinstance(event, BlockStored):
                for each in event.block_hashes:
                    self._stored(each)
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    self._removed(each)

    def shutdown(self) -> None:
        """There is nothing to end."""

    def tell(self, watcher: CacheWatcher) -> None:
        """What has come and gone since this was called last."""
        changes, self._changes = self._changes, []
        for key, there in changes:
            if there:
                watcher.stored(key)
            else:
                watcher.removed(key, Removal.CAPACITY)

    def _stored(self, each: ExternalHash) -> None:
        if each in self._names:
            if not self._cached[each]:
                self._changes.append((self._names[each], True))
            self._cached[each] += 1
            self._wanted[each] += 1

    def _removed(self, each: ExternalHash) -> None:
        if self._cached.get(each):
            self._cached[each] -= 1
            if not self._cached[each]:
                del self._cached[each]
                self._changes.append((self._names[each], False))
            self._release(each)

    def _release(self, each: ExternalHash) -> None:
        self._wanted[each] -= 1
        if not self._wanted[each]:
            del self._wanted[each], self._names[each]
