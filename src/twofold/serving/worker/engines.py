"""The wires between the ranks of a split worker: made before its processes are forked, for one life of it.

Where a worker swaps sequences out to: memory of its host, beside the one that its engine computes on.

What an engine brings to its workers.

Engines by name: one file and one line each. What an engine needs is imported when it is prepared.
"""

import gc
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from twofold.engine.base import Engine, KvLayout
from twofold.errors import ConfigurationError
from twofold.handoff import LeaseWatcher
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.store.client import BlockCopier
from twofold.serving.worker.state import CacheChanges, KvLanding, WorkerScheduler, WorkerState
from twofold.transport.base import Transport


class RankPipe(NamedTuple):
    """One end of what runs between the first rank and another: a pipe for iterations, and one for its memory."""

    steps: Connection
    memory: Connection

    def close(self) -> None:
        self.steps.close()
        self.memory.close()


class RankPipes:
    """Pipes between the first rank and each other, and `store`, a file for all of them to meet at.

    Each process keeps the ends that are its own, so that it notices when the process at the other end is gone.
    """

    def __init__(self, ranks: int, store: str) -> None:
        self.store = f"{store}-{secrets.token_hex(8)}"
        pairs = [(Pipe(), Pipe()) for _ in range(1, ranks)]
        self._firsts = [RankPipe(steps[0], memory[0]) for steps, memory in pairs]
        self._others = [RankPipe(steps[1], memory[1]) for steps, memory in pairs]

    def of_first(self) -> Sequence[RankPipe]:
        """The first rank's ends, by rank from 1; all others are closed in this process."""
        _close(self._others)
        return self._firsts

    def of(self, rank: int) -> RankPipe:
        """Another rank's ends; all others are closed in this process."""
        _close([*self._firsts, *self._others[: rank - 1], *self._others[rank:]])
        return self._others[rank - 1]

    def close(self) -> None:
        """This process is none of the ranks."""
        _close([*self._firsts, *self._others])


def _close(wires: Sequence[RankPipe]) -> None:
    for wire in wires:
        wire.close()


class HostSwapSpace(Protocol):
    """`num_blocks` blocks like those of the engine."""

    @property
    def num_blocks(self) -> int: ...

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy all layers of these blocks, one sequence after the other; to be called by the thread that runs the
        engine, before the batch that they came with."""
        ...


class WorkerDriver(Protocol):
    """What decides what a worker runs, and runs it. The methods are called once each, in this order."""

    def scheduler(
        self, epoch: int, lease_s: float, watcher: LeaseWatcher, changes: CacheChanges
    ) -> WorkerScheduler:
        """What the worker's threads have for a scheduler; it notes in `changes` which blocks come and go."""
        ...

    def bind(self, state: WorkerState) -> None:
        """The worker is there, but for what runs."""
        ...

    def run(self) -> None:
        """Run what there is to run, until the worker is to end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of one worker that depend on its engine. `changed` becomes that of its `WorkerState`.

    An engine may bring a `scheduling` of its own, and is then run by that alone.

    With `swap_space` decodes take memory as they go. A `copier` reaches the blocks that the engine computes on.
    `lives` tells whether all that the engine runs on is alive, beyond this process.
    """

    engine: Engine
    transport: Transport
    eos_token_ids: frozenset[int] = frozenset()
    landing: KvLanding = field(default_factory=KvLanding)
    swap_space: HostSwapSpace | None = None
    copier: BlockCopier | None = None
    scheduling: WorkerDriver | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    lives: Callable[[], bool] = lambda: True


class EngineFactory(Protocol):
    """What is made once, in the nursery, and inherited by every worker that is forked from there."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def model(self) -> str:
        """What it computes: the same on every host that has the same model."""
        ...

    @property
    def kv_layout(self) -> KvLayout | None:
        """What is in a KV block; None where there is nothing in it."""
        ...

    def parts(self, spec: WorkerConfig, epoch: int, wires: RankPipes | None = None) -> WorkerParts:
        """Make the parts of one life of a worker; to be called in its own process. `wires` lead to its other ranks."""
        ...

    def run_rank(self, spec: WorkerConfig, rank: int, wires: RankPipes) -> None:
        """Run another rank of a worker than its first, in a process of its own, until the first has ended."""
        ...


ReportStage = Callable[[str], None]  # told what is being done

# vLLM runs in the worker's own process, on the cores that the worker has, and says what goes wrong only.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def _for_good() -> Iterator[None]:
    """What is imported stays, and there is much of it: nobody looks for garbage in it, meanwhile or later.

    That would take a quarter of the time, and what a worker looks at it no longer shares with those forked beside it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _torch(config: ServiceConfig, stage: ReportStage) -> EngineFactory:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our own stages say what happens
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # no OpenMP pool may exist when workers are forked
    stage("importing torch")
    with _for_good():
        from twofold.serving.worker.torch_parts import prepare  # noqa: PLC0415  (slow, hence a stage of its own)

    return prepare(config, stage)


def _emulated(config: ServiceConfig, stage: ReportStage) -> EngineFactory:
    from twofold.serving.worker.emulated_parts import prepare  # noqa: PLC0415  (others do without)

    stage("reading the catalog")
    return prepare(config)


def check_vllm() -> None:
    """Raises ConfigurationError where vLLM is not installed, without importing it."""
    if find_spec("vllm") is None:
        raise ConfigurationError(
            "--engine vllm needs a package that is not installed: pip install 'twofold[vllm]'"
        )


def _vllm(config: ServiceConfig, stage: ReportStage) -> EngineFactory:
    check_vllm()
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stage("importing vllm")
    with _for_good():
        from twofold.serving.worker.vllm.parts import prepare  # noqa: PLC0415  (slow, hence a stage of its own)

    return prepare(config, stage)


ENGINES: dict[str, Callable[[ServiceConfig, ReportStage], EngineFactory]] = {
    "torch": _torch,
    "emulated": _emulated,
    "vllm": _vllm,
}
