"""A worker process, with one thread each for batches, messages, outgoing hand-offs and incoming hand-offs."""

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

from twofold.engine.base import Engine, SequenceStep
from twofold.instance import Role
from twofold.kvcache.cache import CacheChanges
from twofold.performance.queueing import saturating_tokens
from twofold.performance.transfer import PrefillSpeed
from twofold.security.guard import Context, Guard
from twofold.security.key import read_key
from twofold.security.network import HOME
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.messages import LinkMeasured, Peer, Registered, ToWorker
from twofold.serving.telemetry.logs import end_process
from twofold.serving.worker.driver import batch_driver
from twofold.serving.worker.engines import EngineFactory, RankPipes
from twofold.serving.worker.inbox import HandoffEvents, InboxLoop
from twofold.serving.worker.peers import LinkProber, PeerDirectory
from twofold.serving.worker.receiver import HandoffReader, HandoffReceiver
from twofold.serving.worker.sender import HandoffSender, HandoffWriter, layers_per_transfer
from twofold.serving.worker.state import ControllerDeadline, SharedWorkerState

log = logging.getLogger(__name__)

# Prompt lengths in measurements of prefill speed; no longer prompt is needed once a prefill takes `LONG_PREFILL_S`.
SHORT_PROMPT, LONG_PROMPT = 32, 512
LONG_PREFILL_S = 0.25


class WorkerProcesses(NamedTuple):
    """Functions that the processes of a worker run, one per rank, and a callback for the parent after all forks."""

    runs: Sequence[Callable[[], None]]
    forked: Callable[[], None] = lambda: None


def worker_processes(config: ServiceConfig, spec: WorkerConfig, factory: EngineFactory) -> WorkerProcesses:
    """Return the main functions of a worker's processes, one process for each rank."""
    ranks = spec.split.ranks
    if ranks == 1:
        return WorkerProcesses([partial(run_worker, config, spec, factory)])
    pipes = RankPipes(ranks, f"{config.run_dir}/{spec.instance}")
    others = [partial(_run_rank, spec, factory, rank, pipes) for rank in range(1, ranks)]
    return WorkerProcesses([partial(run_worker, config, spec, factory, pipes), *others], pipes.close)


def run_worker(
    config: ServiceConfig, spec: WorkerConfig, factory: EngineFactory, pipes: RankPipes | None = None
) -> None:
    """Run a worker in this process until shutdown. `pipes` lead to the worker's other ranks."""
    _set_up_process(spec)
    epoch = secrets.randbits(53)
    parts = factory.parts(spec, epoch, pipes)
    layout = parts.engine.layout
    measures, prefill = config.measures(spec), None
    if measures or spec.measures_budget:
        prefill = prefill_speed(parts.engine, min(spec.max_num_batched_tokens, factory.max_model_len))
    if prefill is not None and spec.measures_budget:
        budget = saturating_tokens(prefill.seconds, factory.max_model_len)
        log.info("%s saturates at %d prompt tokens per batch", spec.instance, budget)
        spec = msgspec.structs.replace(spec, max_num_batched_tokens=budget)
    context: Context = zmq.Context()
    network = config.network
    guard = None if network is None else Guard(context, read_key(Path(network.key_file)))
    changes = CacheChanges()
    driver = parts.driver or batch_driver(config, spec, parts, epoch, changes, context)
    state = SharedWorkerState(
        instance=spec.instance,
        scheduler=driver.scheduler,
        blocks=changes,
        sender=HandoffSender(len(layout.layers), time.monotonic, layers_per_transfer(layout)),
        receiver=HandoffReceiver(),
        landing=parts.landing,
        grammars=parts.grammars,
        peers=PeerDirectory(parts.transport, config.host),
        outbox=Outbox(context, guard, spec.instance),
        controller=config.controller,
        changed=parts.changed,
        ranks_alive=parts.ranks_alive,
        deadline=ControllerDeadline() if network is not None and network.host != HOME else None,
    )
    run_batches = driver.loop(state)
    inbox: Inbox[ToWorker] = Inbox(
        context,
        config.worker_inbox(spec.instance, os.getpid()),
        ToWorker,
        guard=guard,
        outside=None if network is None else f"tcp://{network.address}:*",
        on_lost=_exit_after_lost_message,
    )
    if measures:
        LinkProber(
            state.peers,
            lambda target, speed: state.tell(LinkMeasured(source=spec.instance, target=target, speed=speed)),
        ).start()
    _register(state, spec.role, inbox, factory.model, prefill)
    events = HandoffEvents(state)
    writer = HandoffWriter(state.sender, state.peers, state.outbox, checksums=config.kv_checksums)
    state.sender.start(writer.write_layers, writer.offer, events.sent)
    state.receiver.start(HandoffReader(state.peers, layers_per_transfer(layout)).receive, events.received)
    state.prefixes.start()
    loop = InboxLoop(state, events, inbox, config.lease_s)
    inbox_thread = threading.Thread(target=loop.run, name="inbox", daemon=True)
    inbox_thread.start()
    run_batches()
    inbox_thread.join()
    state.sender.close()
    state.receiver.close()
    state.outbox.close()  # drops unsent messages, because the peers are ending as well


def _register(
    state: SharedWorkerState, role: Role, inbox: Inbox[ToWorker], model: str, prefill: PrefillSpeed | None
) -> None:
    peers = state.peers
    peer = Peer(inbox=inbox.address, memory=peers.own_memory, host=peers.host, outside=inbox.outside)
    if state.deadline is not None:
        state.deadline.start()
    status, now_s = state.scheduler.status(), time.monotonic()
    state.tell(Registered(peer=peer, role=role, model=model, status=status, prefill=prefill, now_s=now_s))


def prefill_speed(engine: Engine, max_tokens: int, clock: Callable[[], float] = time.perf_counter) -> PrefillSpeed:
    """Measure the prefill time of a short and a longer prompt. This overwrites KV blocks of the engine."""

    def prefill_s(tokens: int) -> float:
        blocks = tuple(range(-(-tokens // engine.layout.block_size)))
        step = SequenceStep("", [0] * tokens, start=0, block_table=blocks, sampling=None)
        began = clock()
        engine.run([step])
        return clock() - began

    short = max(1, min(SHORT_PROMPT, max_tokens // 2))
    prefill_s(short)
    short_s = min(prefill_s(short) for _ in range(2))
    tokens, taken_s = short, short_s
    while tokens < min(LONG_PROMPT, max_tokens) and taken_s < LONG_PREFILL_S:
        tokens = min(4 * tokens, LONG_PROMPT, max_tokens)
        taken_s = prefill_s(tokens)
    if taken_s < LONG_PREFILL_S:
        taken_s = min(taken_s, prefill_s(tokens))
    if tokens == short:
        return PrefillSpeed(fixed_s=0.0, s_per_token=short_s / short)
    s_per_token = max(taken_s - short_s, 0.0) / (tokens - short)
    return PrefillSpeed(fixed_s=max(0.0, short_s - short * s_per_token), s_per_token=s_per_token)


def _run_rank(spec: WorkerConfig, factory: EngineFactory, rank: int, pipes: RankPipes) -> None:
    _set_up_process(spec)
    factory.run_rank(spec, rank, pipes)


def _set_up_process(spec: WorkerConfig) -> None:
    threading.excepthook = partial(end_process, log)  # peers and the controller notice the exit
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)


def _exit_after_lost_message(sender: str) -> None:
    # The worker's state may be wrong. The restarted worker has no requests.
    log.critical("a message from %s was lost", sender)
    os._exit(1)
