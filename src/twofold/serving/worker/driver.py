"""Scheduler and batch loop of a worker, for all engines but vLLM."""

import os
from collections.abc import Callable

from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.cache import CacheChanges, PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.paged import PagedBlockAllocator, PrefixBlockAllocator
from twofold.performance.profile import MeasuredModel
from twofold.scheduling.batchers import create_batcher
from twofold.scheduling.instance.batcher import Batcher
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import SwapPreemption
from twofold.security.guard import Context
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.store.client import StoreClient
from twofold.serving.telemetry.journal import Journal, JournaledInstance
from twofold.serving.worker.batch_loop import BatchLoop, PipelinedBatchLoop
from twofold.serving.worker.engines import WorkerDriver, WorkerParts
from twofold.serving.worker.prefix_store import StoredPrefixes
from twofold.serving.worker.state import SharedWorkerState

STORE_TIMEOUT_S = 2.0  # the host's store starts at the same time as the workers


def batch_driver(
    config: ServiceConfig, spec: WorkerConfig, parts: WorkerParts, epoch: int, changes: CacheChanges, context: Context
) -> WorkerDriver:
    """Create a worker's scheduler and batch loop. `changes` collects the cached and evicted prompt blocks."""
    scheduler = _scheduler(config, spec, parts, epoch, changes)

    def loop(state: SharedWorkerState) -> Callable[[], None]:
        # With swap preemption, loads from the store would take the free blocks that paused decodes need.
        copier = parts.copier
        if config.store is not None and scheduler.shared is not None and copier is not None and scheduler.swap is None:
            inbox = config.inbox(f"{spec.instance}-{os.getpid()}-store")
            client = StoreClient(context, inbox, config.store_inbox, verify=config.kv_checksums)
            client.wait(STORE_TIMEOUT_S)
            state.prefixes = StoredPrefixes(state, scheduler, client, copier)
        kind = PipelinedBatchLoop if scheduler.stages > 1 else BatchLoop
        return kind(state, scheduler, parts.engine, parts.eos_token_ids, parts.swap_space).run

    return WorkerDriver(scheduler, loop)


def _batcher(config: ServiceConfig, spec: WorkerConfig) -> Batcher:
    budget, most, inline = spec.max_num_batched_tokens, config.engine.max_num_seqs, config.inline
    if inline is None:
        return create_batcher(spec.batcher, budget, most)
    return create_batcher(spec.batcher, budget, most, MeasuredModel("this host", inline.times), inline.tbt_s)


def _scheduler(
    config: ServiceConfig, spec: WorkerConfig, parts: WorkerParts, epoch: int, changes: CacheChanges
) -> InstanceScheduler:
    engine = parts.engine
    num_blocks, block_size = engine.num_blocks, engine.layout.block_size
    shares = config.reuses(spec)
    most_retained = int(num_blocks * config.engine.retained_share)
    blocks = PagedBlockAllocator(num_blocks, block_size)
    if shares:
        cache = PrefixCache(num_blocks, create_eviction(config.engine.eviction), changes, most_retained)
        blocks = PrefixBlockAllocator(block_size, cache)
    leases = LeaseTable(blocks, spec.instance, epoch, config.lease_s, parts.transport)
    batcher = _batcher(config, spec)
    swap_blocks = 0 if parts.swap_space is None else parts.swap_space.num_blocks
    swap = SwapPreemption(blocks, PagedBlockAllocator(swap_blocks, block_size)) if swap_blocks else None
    most = config.engine.max_num_seqs
    # In a live worker, several stages run at the same time only for chunks of prompts.
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
            "lease_s": config.lease_s,
            "swap_blocks": swap_blocks,
            "eviction": config.engine.eviction if shares else None,
            "max_pinned": most_retained,
        },
    )
    return scheduler
