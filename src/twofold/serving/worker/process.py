"""A worker process from its configuration: engine, scheduler, transport, messages."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from twofold.curve.guard import Guard
from twofold.curve.key import read_key
from twofold.curve.network import HOME
from twofold.kvcache.blocks import BlockManager
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.leases import LeaseBook
from twofold.kvcache.shared import SharedBlocks
from twofold.performance.packed import PackedModel
from twofold.performance.saturation import saturating_tokens
from twofold.scheduling.batcher import Batcher
from twofold.scheduling.batchers import BATCHERS, CHUNKED, INLINED
from twofold.scheduling.batchers.inlined import InlinedPrefill
from twofold.scheduling.chunked_pipeline import ChunkedPipelineScheduler
from twofold.scheduling.growth import Growth
from twofold.scheduling.instance import InstanceScheduler
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.journal import Journal, JournaledInstance
from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.messages import ToWorker
from twofold.serving.store.client import StoreClient
from twofold.serving.worker.block_changes import BlockChanges
from twofold.serving.worker.deadline import AlarmDeadline, Deadline
from twofold.serving.worker.handoffs import layers_at_once
from twofold.serving.worker.measuring import prefill_speed
from twofold.serving.worker.parts import Prepared, WorkerParts
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.prefix_store import PrefixStore
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.sender import HandoffSender
from twofold.serving.worker.state import WorkerState
from twofold.serving.worker.wires import Wires
from twofold.serving.worker.worker import work

log = logging.getLogger(__name__)

STORE_S = 2.0  # a worker that begins waits so long for the store that begins beside it


class Processes(NamedTuple):
    """What the processes of one life of a worker do, the worker's own first; `forked` is called when all are there."""

    runs: Sequence[Callable[[], None]]
    forked: Callable[[], None]


def processes_of(config: ServiceConfig, spec: WorkerConfig, prepared: Prepared) -> Processes:
    """One for each rank of the worker, yet to be forked; those beside the first end when that does."""
    ranks = spec.split.ranks
    if ranks == 1:
        return Processes([partial(run_worker, config, spec, prepared)], lambda: None)
    wires = Wires(ranks, f"{config.run_dir}/{spec.instance}")
    others = [partial(_run_rank, spec, prepared, rank, wires) for rank in range(1, ranks)]
    return Processes([partial(run_worker, config, spec, prepared, wires), *others], wires.close)


def run_worker(
    config: ServiceConfig, spec: WorkerConfig, prepared: Prepared, wires: Wires | None = None
) -> None:
    """Run one worker in this process until it is told to shut down; `wires` lead to its other ranks, if it has some."""
    _settle(spec)
    epoch = secrets.randbits(53)
    parts = prepared.parts(spec, epoch, wires)
    engine = parts.engine
    measures, prefill = config.measures(spec), None
    if measures or spec.measures_budget:
        prefill = prefill_speed(engine, min(spec.token_budget, prepared.max_model_len))
    if prefill is not None and spec.measures_budget:
        budget = saturating_tokens(prefill.seconds, prepared.max_model_len)
        log.info("%s is kept busy by %d prompt tokens", spec.instance, budget)
        spec = msgspec.structs.replace(spec, token_budget=budget)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    network = config.network
    guard = None if network is None else Guard(context, read_key(Path(network.key_file)))
    elsewhere = network is not None and network.host != HOME
    blocks = BlockChanges()
    state = WorkerState(
        instance=spec.instance,
        role=spec.role,
        scheduler=_scheduler(config, spec, parts, epoch, blocks),
        blocks=blocks,
        sender=HandoffSender(len(engine.layout.layers), time.monotonic, layers_at_once(engine.layout)),
        receiver=HandoffReceiver(),
        landing=parts.landing,
        peers=PeerDirectory(parts.transport, config.host),
        outbox=Outbox(context, guard, spec.instance),
        controller=config.controller,
        changed=parts.changed,
        lives=parts.lives,
        tether=AlarmDeadline() if elsewhere else Deadline(),
    )
    _use_store(config, spec, parts, state, context)
    inbox: Inbox[ToWorker] = Inbox(
        context,
        config.worker_inbox(spec.instance, os.getpid()),
        ToWorker,
        guard=guard,
        outside=None if network is None else f"tcp://{network.address}:*",
        on_lost=_end_for,
    )
    work(
        state,
        engine,
        prepared.model,
        parts.eos_token_ids,
        inbox,
        config.lease_s,
        checksums=config.kv_checksums,
        prefill=prefill,
        probes=measures,
        swap_space=parts.swap_space,
    )


def _use_store(
    config: ServiceConfig,
    spec: WorkerConfig,
    parts: WorkerParts,
    state: WorkerState,
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Let prompts begin with what the store of this host has, where there is one and the worker finds prefixes at all.

    Decodes that take memory as they go are counted on to have what is free, so their workers do without.
    """
    shared = state.scheduler.shared
    if config.store is None or shared is None or parts.copier is None or state.scheduler.growth is not None:
        return
    inbox = config.inbox(f"{spec.instance}-{os.getpid()}-store")
    client = StoreClient(context, inbox, config.store_inbox, verify=config.kv_checksums)
    client.wait(STORE_S)
    state.prefixes = PrefixStore(state, shared, client, parts.copier)


def _run_rank(spec: WorkerConfig, prepared: Prepared, rank: int, wires: Wires) -> None:
    _settle(spec)
    prepared.run_rank(spec, rank, wires)


def _settle(spec: WorkerConfig) -> None:
    threading.excepthook = _end_process
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """A worker that lost a thread must not go on: its peers and the controller learn of its end."""
    thread = failed.thread.name if failed.thread is not None else "a thread"
    trace = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    log.critical("%s failed", thread, exc_info=trace)
    os._exit(1)


def _end_for(sender: str) -> None:
    """Who missed a message does not know what it holds for whom: its next life does."""
    log.critical("a message from %s was lost on the way", sender)
    os._exit(1)


def _batcher(config: ServiceConfig, spec: WorkerConfig) -> Batcher:
    budget, most, inline = spec.token_budget, config.engine.max_num_seqs, config.inline
    if inline is None or spec.batcher != INLINED:
        return BATCHERS[spec.batcher](budget, most)
    return InlinedPrefill(budget, most, PackedModel("this host", inline.times), inline.tbt_s)


def _scheduler(
    config: ServiceConfig, spec: WorkerConfig, parts: WorkerParts, epoch: int, changes: BlockChanges
) -> InstanceScheduler:
    engine = parts.engine
    num_blocks, block_size = engine.num_blocks, engine.layout.block_size
    shares = config.reuses(spec)
    most_retained = int(num_blocks * config.engine.retained_share)
    blocks = (
        SharedBlocks(num_blocks, block_size, create_eviction(config.engine.eviction), changes, most_retained)
        if shares
        else BlockManager(num_blocks, block_size)
    )
    leases = LeaseBook(blocks, spec.instance, epoch, config.lease_s, parts.transport)
    batcher = _batcher(config, spec)
    swap_blocks = 0 if parts.swap_space is None else parts.swap_space.num_blocks
    growth = Growth(blocks, BlockManager(swap_blocks, block_size)) if swap_blocks else None
    most = config.engine.max_num_seqs
    if spec.split.pipeline > 1 and spec.batcher in CHUNKED:
        return ChunkedPipelineScheduler(batcher, blocks, leases, most, spec.split.pipeline)
    if config.journal_dir is None:
        return InstanceScheduler(batcher, blocks, leases, most, growth=growth)
    scheduler = JournaledInstance(batcher, blocks, leases, most, growth=growth)
    scheduler.journal = Journal(config.journal_dir, spec.instance)
    scheduler.journal.write(
        "instance",
        {
            "instance": spec.instance,
            "batcher": spec.batcher,
            "token_budget": spec.token_budget,
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
