"""Trials on a Ray cluster: the same simulations, so the same results, on more machines."""

from concurrent.futures import Future
from typing import Self

from twofold.errors import ConfigurationError, UserError
from twofold.planning.evaluation import Simulated, Trial
from twofold.planning.problem import Problem
from twofold.planning.simulated import simulated
from twofold.raycluster.connection import connect


class RayExecutor:
    """Tasks of one core each on the cluster at `address`, which must have the same Twofold installed.

    Raises ConfigurationError where Ray is not installed or there is no cluster.
    """

    def __init__(self, problem: Problem, address: str) -> None:
        ray = self._ray = connect(address, "--ray")
        self._problem = ray.put(problem)
        self._task = ray.remote(num_cpus=1)(_run)

    def submit(self, trial: Trial) -> Future[Simulated]:
        outer: Future[Simulated] = Future()
        inner: Future[Simulated | str] = self._task.remote(self._problem, trial).future()
        inner.add_done_callback(lambda done: _pass_on(done, outer))
        return outer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ray.shutdown()


def _run(problem: Problem, trial: Trial) -> Simulated | str:
    """An evaluation, or the sentence of a user's mistake."""
    try:
        return simulated(problem, trial)
    except UserError as error:
        return str(error)


def _pass_on(inner: "Future[Simulated | str]", outer: Future[Simulated]) -> None:
    if inner.cancelled() or not outer.set_running_or_notify_cancel():
        outer.cancel()
        return
    error = inner.exception()
    told = None if error is not None else inner.result()
    if isinstance(told, Simulated):
        outer.set_result(told)
    elif error is not None:
        outer.set_exception(error)
    else:
        outer.set_exception(ConfigurationError(str(told)))
