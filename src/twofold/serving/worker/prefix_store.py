"""Exchange of KV blocks between a worker and the host's KV store, in background threads.

Blocks are loaded and stored layer by layer, so the copies overlap with computation.
"""

import threading
import time
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from twofold.batch import Batch, BatchItem
from twofold.errors import OutOfBlocksError
from twofold.kvcache.allocator import BlockAllocation
from twofold.request import BlockKey, Phase
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.serving.messages import StoreFetch
from twofold.serving.store.client import BlockCopier, StoreClient
from twofold.serving.worker.prefixes import LayerSync, PrefixSource, Queue, ReadyLayers
from twofold.serving.worker.state import SharedWorkerState

_OWNER = "the host's store"
_MAX_FETCHES = 4  # concurrent fetches; the deadlines of queued fetches keep running
# Blocks queued for the store are not freed. If the store is slow and they exceed this share of the engine's pool,
# the blocks of the next iteration are not queued.
_MAX_HELD_SHARE = 1 / 4


class _Held(NamedTuple):
    keys: Sequence[bytes]
    blocks: Sequence[int]
    start: int  # index of the first of these blocks in its request
    grant: BlockAllocation


class _Fetch(NamedTuple):
    what: StoreFetch
    until_s: float  # deadline (monotonic time)
    request_id: str
    keys: Sequence[bytes]
    queue: Queue


class StoredPrefixes(PrefixSource):
    """Prefix source that loads blocks from the host's KV store, and stores computed blocks, in its own threads."""

    def __init__(
        self, state: SharedWorkerState, scheduler: InstanceScheduler, client: StoreClient, copier: BlockCopier
    ) -> None:
        assert scheduler.shared is not None  # noqa: S101  (for the type checker)
        self._state, self._scheduler, self._shared = state, scheduler, scheduler.shared
        self._client, self._copier = client, copier
        self._wanted: SimpleQueue[tuple[str, Sequence[bytes], Queue]] = SimpleQueue()
        self._fetches: SimpleQueue[_Fetch] = SimpleQueue()
        self._puts: SimpleQueue[tuple[Sequence[_Held], ReadyLayers]] = SimpleQueue()  # with their computed layers
        self._loads: list[tuple[frozenset[int], ReadyLayers]] = []  # blocks that are being loaded
        self._held_blocks = 0  # queued for the store

    def start(self) -> None:
        fetches = [(self._fetch_all, "store-fetch")] * _MAX_FETCHES
        for run, name in ((self._bring_all, "store-load"), (self._put_all, "store-put"), *fetches):
            threading.Thread(target=run, name=name, daemon=True).start()

    # -- with the lock held -----------------------------------------------------------------------------------

    def bring(self, request_id: str, keys: Sequence[BlockKey], queue: Queue, fetch: StoreFetch | None = None) -> None:
        here = self._shared.cache.match(keys)
        if self._client.epoch is None or here == len(keys):
            queue()
        elif fetch is not None and fetch.blocks > here:
            until_s = time.monotonic() + fetch.limit_s
            self._fetches.put(_Fetch(fetch, until_s, request_id, _live(keys), queue))
        else:
            self._wanted.put((request_id, _live(keys), queue))

    def begin(self, batch: Batch) -> LayerSync | None:
        loads = self._loads_for(batch.items) if self._loads else []
        computed = self._put(batch.items) if self._client.epoch is not None else None
        return LayerSync(self._copier.layers, loads, computed) if loads or computed is not None else None

    def _loads_for(self, items: Sequence[BatchItem]) -> list[ReadyLayers]:
        # Loads in progress into blocks that the prompts of a batch read.
        scheduler, reads = self._scheduler, set[int]()
        for item in items:
            if item.phase is Phase.PREFILL:
                reads.update(scheduler.blocks_of(item.request_id), scheduler.copy_of(item.request_id) or ())
        return [layers for blocks, layers in self._loads if not blocks.isdisjoint(reads)]

    def _put(self, items: Sequence[BatchItem]) -> ReadyLayers | None:
        if not self._puts.empty() and self._held_blocks > _MAX_HELD_SHARE * self._shared.num_blocks:
            return None
        held = [each for item in items if (each := self._hold(item)) is not None]
        if not held:
            return None
        computed = ReadyLayers()
        self._puts.put((held, computed))
        return computed

    def _hold(self, item: BatchItem) -> _Held | None:
        """Hold the blocks of a request that are full after this batch and not queued for the store yet."""
        shared, sequence = self._shared, self._state.sequences[item.request_id]
        start, end = sequence.stored_blocks, (item.context_tokens + item.num_tokens) // shared.block_size
        keys = _live(sequence.block_keys[start:end])
        if not keys:
            return None
        sequence.stored_blocks = start + len(keys)
        grant = self._scheduler.allocation_of(item.request_id)
        shared.begin_transfer(grant)
        self._held_blocks += len(keys)
        return _Held(keys, tuple(shared.blocks_of(grant)[start : start + len(keys)]), start, grant)

    def _queue(self, request_id: str, queue: Queue) -> None:
        if request_id in self._state.sequences:
            queue()
        self._tell()

    def _tell(self) -> None:
        # Blocks have become free, or a prompt is ready.
        self._scheduler.changed = True
        self._state.grant()
        self._state.changed.notify()

    # -- without the lock -------------------------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        while True:
            what, until_s, request_id, keys, queue = self._fetches.get()
            with self._state.changed:
                wanted, here = request_id in self._state.sequences, self._shared.cache.match(keys)
            left_s = until_s - time.monotonic()
            if wanted and left_s > 0:
                self._client.fetch(keys[here : what.blocks], what.address, left_s)
            self._wanted.put((request_id, keys, queue))

    def _bring_all(self) -> None:
        while True:
            self._bring(*self._wanted.get())

    def _bring(self, request_id: str, keys: Sequence[bytes], queue: Queue) -> None:
        with self._state.changed:
            here = self._shared.cache.match(keys)
        found = self._client.lookup(keys[here:]).blocks if here < len(keys) else 0
        when_sure = partial(self._queue, request_id, queue)
        if not found or not self._load(keys[: here + found], when_sure):
            with self._state.changed:
                when_sure()

    def _load(self, keys: Sequence[bytes], when_sure: Queue) -> bool:
        state, shared = self._state, self._shared
        with state.changed:
            try:
                grant, here = shared.allocate_after(_OWNER, len(keys) * shared.block_size, keys)
            except OutOfBlocksError:
                return False  # waiting for free blocks is no faster than computing the prompt
            blocks = shared.blocks_of(grant)[here:]
        load = (frozenset(blocks), ReadyLayers())

        def coming(count: int) -> None:
            with state.changed:
                shared.publish(grant, keys[: here + count], here)
                self._loads.append(load)
                when_sure()  # queues the prompt: the engine's cache contains its block keys now

        self._client.load(keys[here:], self._copier, blocks, coming, load[1].ready)
        with state.changed:
            self._loads.remove(load)
            shared.release(grant)
            self._tell()
        return True

    def _put_all(self) -> None:
        while True:
            prompts, computed = self._puts.get()
            for keys, blocks, start, grant in prompts:
                self._client.store(keys, self._copier, blocks, start, computed.wait)
                with self._state.changed:
                    self._held_blocks -= len(keys)
                    self._shared.end_transfer(grant)
                    self._tell()


def _live(keys: Sequence[BlockKey]) -> list[bytes]:
    return [key for key in keys if isinstance(key, bytes)]  # all keys of a live service are bytes
