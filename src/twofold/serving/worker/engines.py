"""The interface between a worker and its engine: what an engine provides, and how the fork server prepares it."""

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
from twofold.engine.registry import ENGINES
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.store.client import BlockCopier
from twofold.serving.worker.state import KvLanding, SharedWorkerState, WorkerScheduler
from twofold.transport.base import Transport


class RankPipe(NamedTuple):
    """One end of the two pipes between rank 0 and another rank: for iterations, and for KV memory."""

    steps: Connection
    memory: Connection


class RankPipes:
    """The pipes between rank 0 and all other ranks of a worker, created before its processes are forked.

    `store` is the file for the rendezvous of the ranks' process group. Each process closes the pipe ends of other
    processes, so that it reads EOF when its peer exits.
    """

    def __init__(self, ranks: int, store: str) -> None:
        self.store = f"{store}-{secrets.token_hex(8)}"
        pairs = [(Pipe(), Pipe()) for _ in range(1, ranks)]
        self._first = [RankPipe(steps[0], memory[0]) for steps, memory in pairs]
        self._others = [RankPipe(steps[1], memory[1]) for steps, memory in pairs]

    def of_first(self) -> Sequence[RankPipe]:
        """Return the pipe ends of rank 0, ordered by rank from 1. Close all other ends in this process."""
        _close(self._others)
        return self._first

    def of(self, rank: int) -> RankPipe:
        """Return the pipe ends of rank `rank`, which is not 0. Close all other ends in this process."""
        _close([*self._first, *self._others[: rank - 1], *self._others[rank:]])
        return self._others[rank - 1]

    def close(self) -> None:
        """Close all pipe ends, in a process that is not one of the ranks."""
        _close([*self._first, *self._others])


def _close(pipes: Sequence[RankPipe]) -> None:
    for end in chain.from_iterable(pipes):
        end.close()


class HostSwapSpace(NamedTuple):
    """Host memory for `num_blocks` blocks of swapped-out sequences.

    The function `copy` copies all layers of blocks in order. The engine's thread calls it before the batch that needs
    the blocks.
    """

    num_blocks: int
    copy: Callable[[Sequence[BlockCopy]], None]


class WorkerDriver(NamedTuple):
    """The scheduler of a worker. `loop` returns the worker's main loop, which runs requests until shutdown."""

    scheduler: WorkerScheduler
    loop: Callable[[SharedWorkerState], Callable[[], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The engine of one worker process, and all objects that depend on the engine.

    `driver` replaces `batch_driver` for an engine with a scheduler of its own. `swap_space` enables swap preemption.
    `copier` copies KV blocks to and from the host's store. `changed` becomes the lock of the worker's state, and
    `ranks_alive` returns whether the worker's other ranks run.
    """

    engine: Engine
    transport: Transport
    eos_token_ids: frozenset[int] = frozenset()
    landing: KvLanding = field(default_factory=KvLanding)
    swap_space: HostSwapSpace | None = None
    copier: BlockCopier | None = None
    driver: WorkerDriver | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    ranks_alive: Callable[[], bool] = lambda: True


class EngineFactory:
    """A prepared engine: loaded once in the fork server, and inherited by every forked worker.

    `model` is the fingerprint of the model. `kv_layout` is None if a KV store cannot contain the blocks.
    """

    max_model_len: int
    vocab_size: int
    model: str
    kv_layout: KvLayout | None = None

    @abstractmethod
    def parts(self, spec: WorkerConfig, epoch: int, pipes: RankPipes | None = None) -> WorkerParts:
        """Create the parts of a worker in the worker's process. `pipes` connect this process to its other ranks."""

    def run_rank(self, spec: WorkerConfig, rank: int, pipes: RankPipes) -> None:
        """Run rank `rank` of a worker (not rank 0) in its own process, until rank 0 has exited."""
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
    # Imported objects live forever. Collecting garbage among them would take a quarter of the import time, and
    # a collection in a worker would unshare their memory.
    gc.disable()
    try:
        module = import_module(f"twofold.serving.worker.{engine.module}")
    finally:
        gc.freeze()
        gc.enable()
    factory: EngineFactory = module.prepare(config, report)
    return factory
