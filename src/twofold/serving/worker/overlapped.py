"""The main thread of a worker whose stages have an iteration each."""

from functools import partial

from twofold.engine.base import PipelineEngine, Sampled
from twofold.scheduling.pipeline import PipelineScheduler
from twofold.serving.worker.iterations import Iterations, Started
from twofold.serving.worker.state import WorkerState


class OverlappedIterations(Iterations):
    """The next iteration begins when the first stage is done with the last, as far as the scheduler has any.

    The main thread begins them and computes on the first stage; the engine's own thread completes each when it has
    passed all stages.
    """

    def __init__(
        self,
        state: WorkerState,
        scheduler: PipelineScheduler,
        engine: PipelineEngine,
        eos_token_ids: frozenset[int],
    ) -> None:
        super().__init__(state, scheduler, engine, eos_token_ids)
        self._pipeline = engine

    def run(self) -> None:
        while (started := self._next_batch()) is not None:
            self._prepare(started)
            self._pipeline.begin(started.steps, self._on_layer(started), partial(self._ended, started))
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: not state.batches_started_s)

    def _ended(self, started: Started, sampled: list[Sampled | None]) -> None:
        self._complete(started, sampled)
        with self._state.changed:
            self._state.changed.notify()
