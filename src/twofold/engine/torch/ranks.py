"""Which layers of an iteration are complete, where several ranks compute parts of them.

The engine of a split worker: its first rank, which is told what to run, and the others, which it tells.

first rank                                      another rank
SplitEngine.begin(…) ─── Iteration ──────────▶ follow(…)
  own part of the model ◀─ process group ─────▶   own part of the model
  on_layer(k), when all have it ◀── LayerDone ──   on_layer(k)
  tokens ◀────────────── Tokens, if it samples ──   tokens
"""

import queue
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import msgspec

from twofold.engine.base import IterationDone, KvLayout, OnLayer, Sampled, SequenceStep
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.split_model import first_of_last_stage
from twofold.engine.typed_pipe import TypedPipe
from twofold.kvcache.sharding import Sharding


class LayerProgress:
    """Calls `on_layer` for each layer once all `shards` that hold a part of it have computed theirs, in order.

    Its methods may be called from any thread.
    """

    def __init__(self, num_layers: int, shards: int, on_layer: OnLayer) -> None:
        self._shards = shards
        self._on_layer = on_layer
        self._computed = [0] * num_layers
        self._complete = 0
        self._lock = threading.Lock()

    def computed(self, layer: int) -> None:
        """One rank has the KV of its part of this layer."""
        with self._lock:
            self._computed[layer] += 1
            while self._complete < len(self._computed) and self._computed[self._complete] == self._shards:
                self._announce()

    def finish(self) -> None:
        """The iteration is over, so all layers are complete, also those whose ranks are yet to be heard."""
        with self._lock:
            while self._complete < len(self._computed):
                self._announce()

    def _announce(self) -> None:
        self._on_layer(self._complete)
        self._complete += 1


RANK_HEARTBEAT_S = 0.2
SILENCE_S = 2.0  # a rank that is not heard for so long hangs, or is stopped


class RankIteration(msgspec.Struct, frozen=True):
    """To the other ranks: run these steps, and say `LayerDone` of each layer if `announces`."""

    number: int
    steps: Sequence[SequenceStep]
    announces: bool


class LayerDone(msgspec.Struct, frozen=True, tag=True):
    """From a rank: its part of the KV of a layer is in its pool."""

    number: int
    layer: int


class SampledTokens(msgspec.Struct, frozen=True, tag=True):
    """From the rank that samples."""

    number: int
    sampled: list[Sampled | None]


class RankHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it lives."""


RankMessage = LayerDone | SampledTokens | RankHeartbeat


class _UnderWay(NamedTuple):
    """An iteration that has not passed all stages; `progress` where its layers are announced."""

    progress: LayerProgress | None
    ended: IterationDone


class SplitEngine:
    """Implements `twofold.engine.base.PipelineEngine` on the first rank.

    `own` is its own part, `layout` that of all ranks together; `others` are its ways to ranks 1, 2, …, which follow.
    An iteration that fails anywhere leaves the ranks waiting for each other, so it ends the process: the ranks end
    with it, and the worker starts anew.
    """

    def __init__(
        self, own: TorchEngine, layout: KvLayout, split: Sharding, others: Sequence[Connection]
    ) -> None:
        self.layout = layout
        self._own, self._split = own, split
        self._others = {other: TypedPipe[RankMessage](other, RankMessage) for other in others}
        self._number = 0
        self._under_way: dict[int, _UnderWay] = {}
        self._heard_s = dict.fromkeys(others, time.monotonic())
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    @property
    def num_blocks(self) -> int:
        return self._own.num_blocks

    def lives(self) -> bool:
        """Whether all other ranks were heard lately."""
        return time.monotonic() - min(self._heard_s.values()) < SILENCE_S

    def run(
        self,
        steps: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        wait_for: OnLayer | None = None,
    ) -> list[Sampled | None]:
        """Run one iteration on all ranks (see `Engine.run`); none of them has anything to wait for."""
        assert wait_for is None  # noqa: S101  (workers that are split do not use their host's store)
        if not steps:
            return []
        ended: queue.SimpleQueue[list[Sampled | None]] = queue.SimpleQueue()
        self.begin(steps, on_layer, ended.put)
        return ended.get()

    def begin(self, steps: Sequence[SequenceStep], on_layer: OnLayer | None, ended: IterationDone) -> None:
        """Start one iteration on all ranks (see `PipelineEngine.begin`); with one stage it has ended on return."""
        try:
            self._begin(steps, on_layer, ended)
        except Exception as error:
            raise SystemExit(f"a rank failed in mid-iteration: {error}") from error

    def _begin(self, steps: Sequence[SequenceStep], on_layer: OnLayer | None, ended: IterationDone) -> None:
        self._number += 1
        progress = None
        if on_layer is not None:
            progress = LayerProgress(len(self.layout.layers), self._split.tensor, on_layer)
        self._under_way[self._number] = _UnderWay(progress, ended)
        iteration = RankIteration(self._number, steps, announces=progress is not None)
        for other in self._others.values():
            other.send(iteration)
        sampled = self._own.run(steps, None if progress is None else progress.computed)
        if first_of_last_stage(self._split) == 0:
            self._end(self._number, sampled)

    def _end(self, number: int, sampled: list[Sampled | None]) -> None:
        """The last stage is done with an iteration."""
        iteration = self._under_way.pop(number)
        if iteration.progress is not None:
            iteration.progress.finish()
        iteration.ended(sampled)

    def _listen(self) -> None:
        while True:
            for other in wait(list(self._others)):
                assert isinstance(other, Connection)  # noqa: S101  (nothing else is waited for)
                said = self._others[other].recv()  # ends the process where the rank has ended
                self._heard_s[other] = time.monotonic()
                if isinstance(said, SampledTokens):
                    self._end(said.number, said.sampled)
                elif isinstance(said, LayerDone):
                    self._layer_done(said)

    def _layer_done(self, said: LayerDone) -> None:
        iteration = self._under_way.get(said.number)
        if iteration is not None and iteration.progress is not None:
            iteration.progress.computed(said.layer)


class RankFollower:
    """What another rank says to the first, from any of its threads."""

    def __init__(self, first: Connection) -> None:
        self._first = TypedPipe[RankIteration](first, RankIteration)
        self._lock = threading.Lock()
        self._beat_s = 0.0

    def say(self, message: RankMessage) -> None:
        with self._lock:
            self._first.send(message)

    def beat(self) -> None:
        """Say that this rank lives, if it was not said just now."""
        now = time.monotonic()
        if now - self._beat_s >= RANK_HEARTBEAT_S:
            self._beat_s = now
            self.say(RankHeartbeat())

    def follow(self, engine: TorchEngine) -> None:
        """Run what the first rank says until it has ended."""
        while True:
            try:
                iteration = self._first.recv()
            except EOFError:
                return
            sampled = engine.run(iteration.steps, self._announce(iteration))
            if engine.samples:
                self.say(SampledTokens(iteration.number, sampled))

    def _announce(self, iteration: RankIteration) -> OnLayer | None:
        if not iteration.announces:
            return None
        return lambda layer: self.say(LayerDone(iteration.number, layer))
