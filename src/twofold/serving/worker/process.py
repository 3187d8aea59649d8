"""The worker: drives one instance scheduler with a real clock, a real engine and real messages.

Four threads share it (see `WorkerState`):

    main      Iterations   next_batch → engine.run → complete → tokens to the controller
    inbox     Commands     applies messages at once; heartbeats and leases
    sender    Handoffs     writes computed layers into the leased blocks of peers, or offers them for reading
    receiver  Arrivals     reads what peers offer, and compares checksums

A worker process from its configuration: engine, scheduler, transport, messages.
"""

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

from twofold.engine.base import KvLayout
from twofold.performance.queueing import saturating_tokens
from twofold.performance.transfer import PrefillSpeed
from twofold.security.guard import Guard
from twofold.security.key import read_key
from twofold.security.network import HOME
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.messages import Peer, Registered, ToWorker
from twofold.serving.worker.arrivals import HandoffReader
from twofold.serving.worker.driver import BatchDriver
from twofold.serving.worker.engines import EngineFactory, RankPipes
from twofold.serving.worker.handoffs import HandoffWriter, layers_at_once
from twofold.serving.worker.inbox import InboxLoop
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.probes import LinkProber, prefill_speed
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.sender import HandoffSender
from twofold.serving.worker.state import AlarmDeadline, CacheChanges, ControllerDeadline, WorkerState


def work(
    state: WorkerState,
    run: Callable[[], None],
    layout: KvLayout,
    model: str,
    inbox: Inbox[ToWorker],
    lease_s: float,
    *,
    checksums: bool,
    prefill: PrefillSpeed | None,
    probes: bool,
) -> None:
    """Register with the controller, and then `run` batches until told to shut down.

    `prefill` is how fast it was measured to be, if it was. If it `probes`, it measures what its links carry.
    """
    if probes:
        LinkProber(state).start()
    peer = Peer(
        inbox=inbox.address, memory=state.peers.own_memory, host=state.peers.host, outside=inbox.outside
    )
    state.tether.start()
    status = state.scheduler.status()
    state.tell(
        Registered(
            peer=peer, role=state.role, model=model, status=status, prefill=prefill, now_s=time.monotonic()
        )
    )
    handoffs = HandoffWriter(state, checksums=checksums)
    state.sender.start(handoffs.write_layers, handoffs.offer, handoffs.over)
    arrivals = HandoffReader(state, layers_at_once(layout))
    state.receiver.start(arrivals.receive, arrivals.ended)
    state.prefixes.start()
    receiver = threading.Thread(target=InboxLoop(state, inbox, lease_s).run, name="inbox", daemon=True)
    receiver.start()
    run()
    receiver.join()
    state.sender.close()
    state.receiver.close()
    state.outbox.close()  # nobody acts on what it still has to say: peers end as well, and may have ended


log = logging.getLogger(__name__)

STORE_S = 2.0  # a worker that begins waits so long for the store that begins beside it


class WorkerProcesses(NamedTuple):
    """What the processes of one life of a worker do, the worker's own first; `forked` is called when all are there."""

    runs: Sequence[Callable[[], None]]
    forked: Callable[[], None]


def worker_processes(config: ServiceConfig, spec: WorkerConfig, prepared: EngineFactory) -> WorkerProcesses:
    """One for each rank of the worker, yet to be forked; those beside the first end when that does."""
    ranks = spec.split.ranks
    if ranks == 1:
        return WorkerProcesses([partial(run_worker, config, spec, prepared)], lambda: None)
    wires = RankPipes(ranks, f"{config.run_dir}/{spec.instance}")
    others = [partial(_run_rank, spec, prepared, rank, wires) for rank in range(1, ranks)]
    return WorkerProcesses([partial(run_worker, config, spec, prepared, wires), *others], wires.close)


def run_worker(
    config: ServiceConfig, spec: WorkerConfig, prepared: EngineFactory, wires: RankPipes | None = None
) -> None:
    """Run one worker in this process until it is told to shut down; `wires` lead to its other ranks, if it has some."""
    _settle(spec)
    epoch = secrets.randbits(53)
    parts = prepared.parts(spec, epoch, wires)
    engine = parts.engine
    measures, prefill = config.measures(spec), None
    if measures or spec.measures_budget:
        prefill = prefill_speed(engine, min(spec.max_num_batched_tokens, prepared.max_model_len))
    if prefill is not None and spec.measures_budget:
        budget = saturating_tokens(prefill.seconds, prepared.max_model_len)
        log.info("%s is kept busy by %d prompt tokens", spec.instance, budget)
        spec = msgspec.structs.replace(spec, max_num_batched_tokens=budget)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    network = config.network
    guard = None if network is None else Guard(context, read_key(Path(network.key_file)))
    elsewhere = network is not None and network.host != HOME
    blocks = CacheChanges()
    scheduling = parts.scheduling or BatchDriver(config, spec, parts, context)
    state = WorkerState(
        instance=spec.instance,
        role=spec.role,
        scheduler=scheduling.scheduler(epoch, config.lease_s, parts.transport, blocks),
        blocks=blocks,
        sender=HandoffSender(len(engine.layout.layers), time.monotonic, layers_at_once(engine.layout)),
        receiver=HandoffReceiver(),
        landing=parts.landing,
        peers=PeerDirectory(parts.transport, config.host),
        outbox=Outbox(context, guard, spec.instance),
        controller=config.controller,
        changed=parts.changed,
        lives=parts.lives,
        tether=AlarmDeadline() if elsewhere else ControllerDeadline(),
    )
    scheduling.bind(state)
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
        scheduling.run,
        engine.layout,
        prepared.model,
        inbox,
        config.lease_s,
        checksums=config.kv_checksums,
        prefill=prefill,
        probes=measures,
    )


def _run_rank(spec: WorkerConfig, prepared: EngineFactory, rank: int, wires: RankPipes) -> None:
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
