"""An engine on several ranks: rank 0 sends each iteration to the other ranks, and every rank computes its part."""

import queue
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from twofold.engine.base import IterationDone, KvLayout, OnLayer, Sampled, SequenceStep
from twofold.engine.rank_link import FirstRankLink, LayerProgress, RankHeartbeat, RankLinks
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.split_model import first_of_last_stage
from twofold.kvcache.sharding import Sharding


# Messages:
#
# rank 0                                          another rank
# SplitEngine.begin(…) ─── RankIteration ──────▶ follow(…)
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


RankMessage = LayerDone | SampledTokens | RankHeartbeat


class SplitEngine:
    """Engine of a sharded instance. It runs on rank 0, and sends iterations to the other ranks."""

    def __init__(self, own: TorchEngine, layout: KvLayout, split: Sharding, others: Sequence[Connection]) -> None:
        self.layout, self.num_blocks = layout, own.num_blocks  # the layout is that of all ranks together
        self._own, self._split = own, split
        self._number = 0
        self._running: dict[int, tuple[LayerProgress | None, IterationDone]] = {}  # iterations in some stage
        self._others = RankLinks(others, RankMessage, self._handle)
        self.ranks_alive = self._others.alive

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
        self._running[self._number] = (progress, ended)
        self._others.send(RankIteration(self._number, steps, reports_layers=progress is not None))
        sampled = self._own.run(steps, None if progress is None else progress.computed)
        if first_of_last_stage(self._split) == 0:
            self._end(self._number, sampled)

    def _end(self, number: int, sampled: list[Sampled | None]) -> None:
        """Complete an iteration with the tokens from the last stage."""
        progress, ended = self._running.pop(number)
        if progress is not None:
            progress.finish()
        ended(sampled)

    def _handle(self, _place: int, message: RankMessage) -> None:
        if isinstance(message, SampledTokens):
            self._end(message.number, message.sampled)
        elif isinstance(message, LayerDone):
            progress, _ = self._running.get(message.number, (None, None))
            if progress is not None:
                progress.computed(message.layer)


def follow(link: FirstRankLink[RankIteration], engine: TorchEngine) -> None:
    """Run the iterations that rank 0 requests on another rank, until rank 0 exits."""
    while True:
        try:
            iteration = link.recv()
        except EOFError:
            return
        report = partial(_report_layer, link, iteration.number)
        sampled = engine.run(iteration.steps, report if iteration.reports_layers else None)
        if engine.samples:
            link.send(SampledTokens(iteration.number, sampled))


def _report_layer(link: FirstRankLink[RankIteration], number: int, layer: int) -> None:
    link.send(LayerDone(number, layer))
