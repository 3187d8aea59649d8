"""What an engine brings to its workers."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from twofold.engine.base import Engine, KvLayout
from twofold.handoff import LeaseWatcher
from twofold.serving.config import WorkerConfig
from twofold.serving.store.client import Copier
from twofold.serving.worker.block_changes import BlockChanges
from twofold.serving.worker.landing import Landing
from twofold.serving.worker.scheduling import WorkerScheduler
from twofold.serving.worker.state import WorkerState
from twofold.serving.worker.swapping import SwapSpace
from twofold.serving.worker.wires import Wires
from twofold.transport.base import Transport


class Scheduling(Protocol):
    """What decides what a worker runs, and runs it. The methods are called once each, in this order."""

    def scheduler(
        self, epoch: int, lease_s: float, watcher: LeaseWatcher, changes: BlockChanges
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
    landing: Landing = field(default_factory=Landing)
    swap_space: SwapSpace | None = None
    copier: Copier | None = None
    scheduling: Scheduling | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    lives: Callable[[], bool] = lambda: True


class Prepared(Protocol):
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

    def parts(self, spec: WorkerConfig, epoch: int, wires: Wires | None = None) -> WorkerParts:
        """Make the parts of one life of a worker; to be called in its own process. `wires` lead to its other ranks."""
        ...

    def run_rank(self, spec: WorkerConfig, rank: int, wires: Wires) -> None:
        """Run another rank of a worker than its first, in a process of its own, until the first has ended."""
        ...
