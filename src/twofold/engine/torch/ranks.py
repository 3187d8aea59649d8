"""An engine on several ranks: rank 0 sends each iteration to the other ranks, and every rank computes its part."""

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
    """Calls `on_layer` for each layer in order, once all tensor shards have computed the layer. Thread-safe."""

    def __init__(self, num_layers: int, shards: int, on_layer: OnLayer) -> None:
        self._shards = shards
        self._on_layer = on_layer
        self._computed = [0] * num_layers
        self._complete = 0
        self._lock = threading.Lock()

    def computed(self, layer: int) -> None:
        """Record that one rank has computed its part of a layer."""
        with self._lock:
            self._computed[layer] += 1
            while self._complete < len(self._computed) and self._computed[self._complete] == self._shards:
                self._announce()

    def finish(self) -> None:
        """Call `on_layer` for the remaining layers at the end of an iteration."""
        with self._lock:  # not all `LayerDone` messages may have arrived
            while self._complete < len(self._computed):
                self._announce()

    def _announce(self) -> None:
        self._on_layer(self._complete)
        self._complete += 1


RANK_HEARTBEAT_S = 0.2
RANK_TIMEOUT_S = 2.0  # a rank without a heartbeat for this long hangs


# Messages:
#
# rank 0                                          another rank
# SplitEngine.begin(…) ─── RankIteration ──────▶ RankFollower.follow(…)
#   its part of the model ◀─ process group ─────▶   its part of the model
#   on_layer(k), if all have it ◀── LayerDone ────   on_layer(k)
#   tokens ◀──────────── SampledTokens, if it samples
class RankIteration(msgspec.Struct, frozen=True):
    """Message from rank 0 to another rank: run an iteration."""

    number: int
    steps: Sequence[SequenceStep]
    reports_layers: bool  # the receiver sends a `LayerDone` for each layer


class LayerDone(msgspec.Struct, frozen=True, tag=True):
    """Message to rank 0: the sender has computed its part of a layer."""

    number: int
    layer: int


class SampledTokens(msgspec.Struct, frozen=True, tag=True):
    """Message to rank 0 with the sampled tokens of an iteration."""

    number: int
    sampled: list[Sampled | None]


class RankHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a rank, sent to rank 0."""


RankMessage = LayerDone | SampledTokens | RankHeartbeat


class _RunningIteration(NamedTuple):
    """An iteration that has not yet passed all pipeline stages."""

    progress: LayerProgress | None  # None: the worker needs no layer callbacks
    ended: IterationDone


class SplitEngine:
    """Engine of a sharded instance. It runs on rank 0, and sends iterations to the other ranks."""

    def __init__(self, own: TorchEngine, layout: KvLayout, split: Sharding, others: Sequence[Connection]) -> None:
        self.layout, self.num_blocks = layout, own.num_blocks  # the layout is that of all ranks together
        self._own, self._split = own, split
        self._others = {other: TypedPipe[RankMessage](other, RankMessage) for other in others}
        self._number = 0
        self._running: dict[int, _RunningIteration] = {}
        self._heard_s = dict.fromkeys(others, time.monotonic())
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def ranks_alive(self) -> bool:
        """Return whether no other rank has been silent for `RANK_TIMEOUT_S` seconds or longer."""
        return time.monotonic() - min(self._heard_s.values()) < RANK_TIMEOUT_S

    def run(
        self, steps: Sequence[SequenceStep], on_layer: OnLayer | None = None, wait_for: OnLayer | None = None
    ) -> list[Sampled | None]:
        assert wait_for is None  # noqa: S101  (no KV store with several ranks)
        if not steps:
            return []
        ended: queue.SimpleQueue[list[Sampled | None]] = queue.SimpleQueue()
        self.begin(steps, on_layer, ended.put)
        return ended.get()

    def begin(self, steps: Sequence[SequenceStep], on_layer: OnLayer | None, ended: IterationDone) -> None:
        """Start an iteration on all ranks (see `PipelineEngine.begin`)."""
        try:
            self._begin(steps, on_layer, ended)
        except Exception as error:
            # The other ranks would wait forever.
            raise SystemExit(f"a rank failed during an iteration: {error}") from error

    def _begin(self, steps: Sequence[SequenceStep], on_layer: OnLayer | None, ended: IterationDone) -> None:
        self._number += 1
        progress = None
        if on_layer is not None:
            progress = LayerProgress(len(self.layout.layers), self._split.tensor, on_layer)
        self._running[self._number] = _RunningIteration(progress, ended)
        iteration = RankIteration(self._number, steps, reports_layers=progress is not None)
        for other in self._others.values():
            other.send(iteration)
        sampled = self._own.run(steps, None if progress is None else progress.computed)
        if first_of_last_stage(self._split) == 0:
            self._end(self._number, sampled)

    def _end(self, number: int, sampled: list[Sampled | None]) -> None:
        """Complete an iteration with the tokens from the last stage."""
        iteration = self._running.pop(number)
        if iteration.progress is not None:
            iteration.progress.finish()
        iteration.ended(sampled)

    def _listen(self) -> None:
        while True:
            for other in wait(list(self._others)):
                assert isinstance(other, Connection)  # noqa: S101  (for the type checker)
                message = self._others[other].recv()  # raises if the rank has exited
                self._heard_s[other] = time.monotonic()
                if isinstance(message, SampledTokens):
                    self._end(message.number, message.sampled)
                elif isinstance(message, LayerDone):
                    iteration = self._running.get(message.number)
                    if iteration is not None and iteration.progress is not None:
                        iteration.progress.computed(message.layer)


class RankFollower:
    """On a rank other than 0, runs the iterations that rank 0 requests."""

    def __init__(self, first: Connection) -> None:
        self._first = TypedPipe[RankIteration](first, RankIteration)
        self._lock = threading.Lock()  # `send` and `heartbeat` are thread-safe
        self._heartbeat_s = 0.0

    def send(self, message: RankMessage) -> None:
        with self._lock:
            self._first.send(message)

    def heartbeat(self) -> None:
        """Send a heartbeat to rank 0, at most once every `RANK_HEARTBEAT_S` seconds."""
        now = time.monotonic()
        if now - self._heartbeat_s >= RANK_HEARTBEAT_S:
            self._heartbeat_s = now
            self.send(RankHeartbeat())

    def follow(self, engine: TorchEngine) -> None:
        """Run iterations until rank 0 exits."""
        while True:
            try:
                iteration = self._first.recv()
            except EOFError:
                return
            sampled = engine.run(iteration.steps, self._announce(iteration))
            if engine.samples:
                self.send(SampledTokens(iteration.number, sampled))

    def _announce(self, iteration: RankIteration) -> OnLayer | None:
        if not iteration.reports_layers:
            return None
        return lambda layer: self.send(LayerDone(iteration.number, layer))
