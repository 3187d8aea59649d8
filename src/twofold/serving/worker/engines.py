"""Interface between a worker and its engine, and preparation of the engine in the fork server."""

import gc
import os
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from twofold.engine.base import Engine, KvLayout
from twofold.engine.grammar import GrammarMatchers
from twofold.engine.registry import ENGINES
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.store.client import BlockCopier
from twofold.serving.worker.state import KvLanding, SharedWorkerState, WorkerScheduler
from twofold.transport.base import Transport


class RankPipe(NamedTuple):
    """Pipes between two ranks of a worker: `steps` for iterations to run, `memory` for commands to copy KV blocks."""

    steps: Connection
    memory: Connection


class RankPipes:
    """Pipes between rank 0 and the other ranks of a worker. Create them before the ranks are forked."""

    def __init__(self, ranks: int, store: str) -> None:
        self.store = f"{store}-{secrets.token_hex(8)}"  # file with which the ranks form a process group
        pairs = [(Pipe(), Pipe()) for _ in range(1, ranks)]
        self._first = [RankPipe(steps[0], memory[0]) for steps, memory in pairs]
        self._others = [RankPipe(steps[1], memory[1]) for steps, memory in pairs]

    def of_first(self) -> Sequence[RankPipe]:
        """Return rank 0's pipe ends, a RankPipe for each other rank, in order. Close the others' in this process."""
        # A process that keeps no other ends reads EOF when the process at the other end exits.
        _close(self._others)
        return self._first

    def of(self, rank: int) -> RankPipe:
        """Return the pipe ends of rank `rank`, at least 1. Close those of all other ranks in this process."""
        _close([*self._first, *self._others[: rank - 1], *self._others[rank:]])
        return self._others[rank - 1]

    def close(self) -> None:
        """Close all pipe ends in a process that is not a rank, such as the fork server."""
        _close([*self._first, *self._others])


def _close(pipes: Sequence[RankPipe]) -> None:
    for end in chain.from_iterable(pipes):
        end.close()


class HostSwapSpace(NamedTuple):
    """Host memory for `num_blocks` swapped-out KV blocks, and the function `copy` that swaps blocks out and in."""

    num_blocks: int
    copy: Callable[[Sequence[BlockCopy]], None]


class WorkerDriver(NamedTuple):
    """Scheduler of a worker, and a function that creates the worker's main loop."""

    scheduler: WorkerScheduler
    loop: Callable[[SharedWorkerState], Callable[[], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """Engine of one worker process, and all objects that depend on it."""

    engine: Engine
    transport: Transport
    eos_token_ids: frozenset[int] = frozenset()
    landing: KvLanding = field(default_factory=KvLanding)
    grammars: GrammarMatchers | None = None  # None: constrained requests fail
    swap_space: HostSwapSpace | None = None  # None: no swap preemption
    copier: BlockCopier | None = None  # for KV blocks of the host's store
    driver: WorkerDriver | None = None  # of an engine with its own scheduler
    changed: threading.Condition = field(default_factory=threading.Condition)  # lock of the worker's state
    ranks_alive: Callable[[], bool] = lambda: True  # whether all other ranks respond


class EngineFactory:
    """Factory of workers' engines, prepared once in the fork server and inherited by all workers."""

    max_model_len: int
    vocab_size: int
    model: str  # fingerprint
    kv_layout: KvLayout | None = None  # None: the host's KV store cannot contain its blocks
    device: str = ""  # of the workers on this host; empty if they compute nothing

    @abstractmethod
    def parts(self, spec: WorkerConfig, epoch: int, pipes: RankPipes | None = None) -> WorkerParts:
        """Create a worker's engine and transport in the calling process."""

    def run_rank(self, spec: WorkerConfig, rank: int, pipes: RankPipes) -> None:
        """Run the nonzero rank `rank` of a worker in this process until rank 0 exits."""
        raise NotImplementedError


ReportStage = Callable[[str], None]  # called with a description of the current startup stage


def prepare_engine(config: ServiceConfig, report: ReportStage) -> EngineFactory:
    """Import and prepare the configured engine. Raises UserError if it cannot serve the model."""
    engine = ENGINES[config.engine.engine]
    engine.check_installed()
    for name, value in engine.environment.items():
        os.environ.setdefault(name, value)
    if engine.package is not None:
        report(f"importing {engine.package}")
    # Imported objects are never freed. Garbage collection during the import would take a quarter of its time, and a
    # collection in a worker would unshare the memory of these objects.
    gc.disable()
    try:
        module = import_module(f"twofold.serving.worker.{engine.module}")
    finally:
        gc.freeze()
        gc.enable()
    factory: EngineFactory = module.prepare(config, report)
    return factory
