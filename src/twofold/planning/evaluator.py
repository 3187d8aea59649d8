"""Answers trials: from memory, from the store, or by simulation; and counts what that took."""

import asyncio
from collections.abc import Callable

import msgspec

from twofold.planning.evaluation import Evaluation, Trial
from twofold.planning.executors.base import Executor
from twofold.planning.store import Store


class Effort(msgspec.Struct, kw_only=True):
    """What a plan took: simulations run and reused, the requests simulated and the CPU seconds they took."""

    simulations: int = 0
    reused: int = 0
    requests: int = 0
    cpu_s: float = 0.0

    @property
    def requests_per_cpu_s(self) -> float | None:
        return self.requests / self.cpu_s if self.cpu_s > 0 else None


Listener = Callable[[Effort, Trial, Evaluation], None]


class Evaluator:
    """`Evaluate` by way of an executor. A trial that is asked for twice is run once."""

    def __init__(
        self,
        executor: Executor,
        store: Store,
        key: Callable[[Trial], str],
        listener: Listener | None = None,
    ) -> None:
        self._executor, self._store, self._key, self._listener = executor, store, key, listener
        self._asked: dict[Trial, asyncio.Future[Evaluation]] = {}
        self.effort = Effort()

    async def __call__(self, trial: Trial) -> Evaluation:
        asked = self._asked.get(trial)
        if asked is None:
            asked = self._asked[trial] = asyncio.ensure_future(self._answer(trial))
        return await asyncio.shield(asked)

    def answered(self) -> dict[Trial, Evaluation]:
        """Every trial so far with its answer, by name and rate, so not in the order in which they came."""
        done = [(trial, asked.result()) for trial, asked in self._asked.items() if asked.done()]
        return dict(sorted(done, key=lambda each: (each[0].design.name, each[0].rate)))

    async def _answer(self, trial: Trial) -> Evaluation:
        key = self._key(trial)
        evaluation = self._store.get(key)
        if evaluation is not None:
            self.effort.reused += 1
        else:
            simulated = await asyncio.wrap_future(self._executor.submit(trial))
            evaluation = simulated.evaluation
            self._store.put(key, f"{trial.design.name} at {trial.rate:g}/s", evaluation)
            self.effort.simulations += 1
            self.effort.requests += evaluation.requests
            self.effort.cpu_s += simulated.cpu_s
        if self._listener is not None:
            self._listener(self.effort, trial, evaluation)
        return evaluation
