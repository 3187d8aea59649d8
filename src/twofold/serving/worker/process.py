"""A worker process from its configuration: memory, engine, scheduler, transport, messages."""

import logging
import os
import secrets
import threading
import time

import torch
import zmq

from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import LoadedModel
from twofold.engine.torch.pool import KvPool
from twofold.kvcache.blocks import BlockManager
from twofold.kvcache.leases import LeaseBook
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance import InstanceScheduler
from twofold.serving.config import CONTROLLER, ServiceConfig, WorkerConfig
from twofold.serving.journal import Journal, JournaledInstance
from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.memory_plan import MemoryPlan
from twofold.serving.messages import ToWorker
from twofold.serving.worker.landing import Landing
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.sender import HandoffSender
from twofold.serving.worker.state import WorkerState
from twofold.serving.worker.worker import work
from twofold.transport.memory import SharedMemory
from twofold.transport.shared_memory import SharedMemoryTransport

log = logging.getLogger(__name__)


def run_worker(config: ServiceConfig, spec: WorkerConfig, model: LoadedModel, plan: MemoryPlan) -> None:
    """Run one worker in this process until it is told to shut down."""
    threading.excepthook = _end_process
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    torch.set_num_threads(spec.threads)
    epoch = secrets.randbits(53)
    memory = SharedMemory.create(spec.instance, plan.layout.pool_bytes(plan.num_blocks))
    landing_pool = KvPool(plan.layout, plan.num_blocks, memory.tensor())
    engine_pool = _engine_pool(config.engine.device, landing_pool)
    transport = SharedMemoryTransport(spec.instance, epoch, memory, engine_pool, plan.num_blocks)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    state = WorkerState(
        instance=spec.instance,
        role=spec.role,
        scheduler=_scheduler(config, spec, plan, epoch),
        sender=HandoffSender(len(plan.layout.layers), time.monotonic),
        landing=Landing(landing_pool, engine_pool),
        peers=PeerDirectory(transport),
        outbox=Outbox(context),
        controller=config.inbox(CONTROLLER),
    )
    # Each life has an inbox of its own: what was meant for an earlier one does not arrive.
    inbox: Inbox[ToWorker] = Inbox(context, config.inbox(f"{spec.instance}-{os.getpid()}"), ToWorker)
    engine = TorchEngine(model.to(config.engine.device), engine_pool)
    work(state, engine, config.engine.model, frozenset(model.eos_token_ids), inbox, config.lease_s)


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """A worker that lost a thread must not go on: its peers and the controller learn of its end."""
    thread = failed.thread.name if failed.thread is not None else "a thread"
    trace = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    log.critical("%s failed", thread, exc_info=trace)
    os._exit(1)


def _engine_pool(device: str, landing_pool: KvPool) -> KvPool:
    """On a CPU the engine computes in the memory that peers write; elsewhere it has a pool of its own."""
    if torch.device(device).type == "cpu":
        return landing_pool
    return KvPool(landing_pool.layout, landing_pool.num_blocks, None, device=device)


def _scheduler(config: ServiceConfig, spec: WorkerConfig, plan: MemoryPlan, epoch: int) -> InstanceScheduler:
    blocks = BlockManager(plan.num_blocks, plan.layout.block_size)
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
            "num_blocks": plan.num_blocks,
            "block_size": plan.layout.block_size,
            "epoch": epoch,
            "lease_s": config.lease_s,
        },
    )
    return scheduler
