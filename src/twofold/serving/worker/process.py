"""A worker process from its configuration: engine, scheduler, transport, messages."""

import logging
import os
import secrets
import threading
import time

import zmq

from twofold.engine.base import Engine
from twofold.kvcache.blocks import BlockManager
from twofold.kvcache.leases import LeaseBook
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance import InstanceScheduler
from twofold.serving.config import CONTROLLER, ServiceConfig, WorkerConfig
from twofold.serving.journal import Journal, JournaledInstance
from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.messages import ToWorker
from twofold.serving.worker.handoffs import layers_at_once
from twofold.serving.worker.parts import Prepared
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.sender import HandoffSender
from twofold.serving.worker.state import WorkerState
from twofold.serving.worker.worker import work

log = logging.getLogger(__name__)


def run_worker(config: ServiceConfig, spec: WorkerConfig, prepared: Prepared) -> None:
    """Run one worker in this process until it is told to shut down."""
    threading.excepthook = _end_process
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    epoch = secrets.randbits(53)
    parts = prepared.parts(spec, epoch)
    engine = parts.engine
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    state = WorkerState(
        instance=spec.instance,
        role=spec.role,
        scheduler=_scheduler(config, spec, engine, epoch),
        sender=HandoffSender(len(engine.layout.layers), time.monotonic, layers_at_once(engine.layout)),
        receiver=HandoffReceiver(),
        landing=parts.landing,
        peers=PeerDirectory(parts.transport),
        outbox=Outbox(context),
        controller=config.inbox(CONTROLLER),
        changed=parts.changed,
    )
    inbox: Inbox[ToWorker] = Inbox(context, config.worker_inbox(spec.instance, os.getpid()), ToWorker)
    work(
        state,
        engine,
        config.engine.model,
        parts.eos_token_ids,
        inbox,
        config.lease_s,
        checksums=config.kv_checksums,
        measured_tokens=min(spec.token_budget, prepared.max_model_len) if config.measures(spec) else None,
    )


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """A worker that lost a thread must not go on: its peers and the controller learn of its end."""
    thread = failed.thread.name if failed.thread is not None else "a thread"
    trace = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    log.critical("%s failed", thread, exc_info=trace)
    os._exit(1)


def _scheduler(config: ServiceConfig, spec: WorkerConfig, engine: Engine, epoch: int) -> InstanceScheduler:
    num_blocks, block_size = engine.num_blocks, engine.layout.block_size
    blocks = BlockManager(num_blocks, block_size)
    leases = LeaseBook(blocks, spec.instance, epoch, config.lease_s)
    batcher = BATCHERS[spec.batcher](spec.token_budget, config.engine.max_num_seqs)
    if config.journal_dir is None:
        return InstanceScheduler(batcher, blocks, leases, config.engine.max_num_seqs)
    scheduler = JournaledInstance(batcher, blocks, leases, config.engine.max_num_seqs)
    scheduler.journal = Journal(config.journal_dir, spec.instance)
    scheduler.journal.write(
        "instance",
        {
            "instance": spec.instance,
            "batcher": spec.batcher,
            "token_budget": spec.token_budget,
            "max_num_seqs": config.engine.max_num_seqs,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "epoch": epoch,
            "lease_s": config.lease_s,
        },
    )
    return scheduler
