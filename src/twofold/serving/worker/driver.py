"""Our own scheduling of a worker: the instance scheduler, and the loop that runs what it says next."""

import os

import zmq

from twofold.engine.base import PipelineEngine
from twofold.handoff import LeaseWatcher
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.leases import LeaseTable
from twofold.kvcache.paged import PagedBlockAllocator, PrefixBlockAllocator
from twofold.performance.host_profile import PackedModel
from twofold.scheduling.batchers import create_batcher
from twofold.scheduling.instance.batcher import Batcher
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import SwapPreemption
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.store.client import StoreClient
from twofold.serving.telemetry.journal import Journal, JournaledInstance
from twofold.serving.worker.batch_loop import BatchLoop, PipelinedBatchLoop
from twofold.serving.worker.engines import WorkerParts
from twofold.serving.worker.prefix_store import StoredPrefixes
from twofold.serving.worker.state import CacheChanges, WorkerState

STORE_S = 2.0  # a worker that begins waits so long for the store that begins beside it


class BatchDriver:
    """For engines that run what they are told to."""

    def __init__(
        self,
        config: ServiceConfig,
        spec: WorkerConfig,
        parts: WorkerParts,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._config, self._spec, self._parts, self._context = config, spec, parts, context

    def scheduler(
        self, epoch: int, lease_s: float, watcher: LeaseWatcher, changes: CacheChanges
    ) -> InstanceScheduler:
        self._scheduler = _scheduler(self._config, self._spec, self._parts, epoch, lease_s, watcher, changes)
        return self._scheduler

    def bind(self, state: WorkerState) -> None:
        parts, scheduler = self._parts, self._scheduler
        self._use_store(state)
        if scheduler.stages > 1:
            assert isinstance(parts.engine, PipelineEngine)  # noqa: S101  (others get no such scheduler)
            self._iterations: BatchLoop = PipelinedBatchLoop(
                state, scheduler, parts.engine, parts.eos_token_ids
            )
        else:
            self._iterations = BatchLoop(
                state, scheduler, parts.engine, parts.eos_token_ids, parts.swap_space
            )

    def run(self) -> None:
        self._iterations.run()

    def _use_store(self, state: WorkerState) -> None:
        """Let prompts begin with what the store of this host has, where there is one and the worker finds prefixes.

        Decodes that take memory as they go are counted on to have what is free, so their workers do without.
        """
        config, copier, shared = self._config, self._parts.copier, self._scheduler.shared
        if config.store is None or shared is None or copier is None or self._scheduler.swap is not None:
            return
        inbox = config.inbox(f"{self._spec.instance}-{os.getpid()}-store")
        client = StoreClient(self._context, inbox, config.store_inbox, verify=config.kv_checksums)
        client.wait(STORE_S)
        state.prefixes = StoredPrefixes(state, self._scheduler, shared, client, copier)


def _batcher(config: ServiceConfig, spec: WorkerConfig) -> Batcher:
    budget, most, inline = spec.max_num_batched_tokens, config.engine.max_num_seqs, config.inline
    if inline is None:
        return create_batcher(spec.batcher, budget, most)
    return create_batcher(spec.batcher, budget, most, PackedModel("this host", inline.times), inline.tbt_s)


def _scheduler(
    config: ServiceConfig,
    spec: WorkerConfig,
    parts: WorkerParts,
    epoch: int,
    lease_s: float,
    watcher: LeaseWatcher,
    changes: CacheChanges,
) -> InstanceScheduler:
    engine = parts.engine
    num_blocks, block_size = engine.num_blocks, engine.layout.block_size
    shares = config.reuses(spec)
    most_retained = int(num_blocks * config.engine.retained_share)
    blocks = (
        PrefixBlockAllocator(
            num_blocks, block_size, create_eviction(config.engine.eviction), changes, most_retained
        )
        if shares
        else PagedBlockAllocator(num_blocks, block_size)
    )
    leases = LeaseTable(blocks, spec.instance, epoch, lease_s, watcher)
    batcher = _batcher(config, spec)
    swap_blocks = 0 if parts.swap_space is None else parts.swap_space.num_blocks
    swap = SwapPreemption(blocks, PagedBlockAllocator(swap_blocks, block_size)) if swap_blocks else None
    most = config.engine.max_num_seqs
    # Stages of a live worker run concurrently for the chunks of prompts only.
    stages = spec.split.pipeline if batcher.chunked else 1
    if config.journal_dir is None:
        return InstanceScheduler(batcher, blocks, leases, most, swap=swap, stages=stages)
    scheduler = JournaledInstance(batcher, blocks, leases, most, swap=swap, stages=stages)
    scheduler.journal = Journal(config.journal_dir, spec.instance)
    scheduler.journal.write(
        "instance",
        {
            "instance": spec.instance,
            "batcher": spec.batcher,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "max_num_seqs": most,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "epoch": epoch,
            "lease_s": lease_s,
            "swap_blocks": swap_blocks,
            "eviction": config.engine.eviction if shares else None,
            "max_pinned": most_retained,
        },
    )
    return scheduler
