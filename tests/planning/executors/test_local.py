"""The executor that runs planning simulations in local processes: results, error messages and shutdown."""

import asyncio
import signal
import time
from pathlib import Path

import msgspec
import pytest

from twofold.errors import ConfigurationError
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.evaluator import EvaluationStore, Evaluator
from twofold.planning.executors import local
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.trials import simulate_trial


def trial(problem, rate=4.0):
    return Trial(Design(family=Family(kinds=(problem.kind("h100"),) * 2), counts=(2, 2)), rate)


def test_workers_return_the_results_of_a_local_simulation(make_problem):
    problem = make_problem()
    trials = [trial(problem, rate) for rate in (2.0, 4.0, 8.0)]
    with LocalExecutor(problem, 2) as executor:
        futures = [executor.submit(each) for each in trials]
        told = [future.result(600).evaluation for future in futures]
    assert told == [simulate_trial(problem, each).evaluation for each in trials]


def test_user_errors_keep_their_message(make_problem):
    problem = make_problem()
    wrong = msgspec.structs.replace(problem, template=msgspec.structs.replace(problem.template, handoff="pigeon"))
    with (
        EvaluationStore(Path(":memory:")) as store,
        LocalExecutor(wrong, 1) as executor,
        pytest.raises(ConfigurationError, match="pigeon"),
    ):
        asyncio.run(Evaluator(executor, store, str)(trial(wrong)))


def test_leaving_the_context_cancels_running_trials(make_problem):
    problem = make_problem(duration_s=20_000.0)
    with LocalExecutor(problem, 1) as executor:
        futures = [executor.submit(trial(problem, rate)) for rate in (10.0, 11.0, 12.0)]
        while not futures[0].running() and not executor._pool._processes:
            time.sleep(0.01)
    assert all(future.done() for future in futures)
    assert all(future.cancelled() or future.result(0) == "the plan was cancelled" for future in futures)


def test_rejects_zero_jobs(make_problem):
    with pytest.raises(ConfigurationError, match="--jobs must be at least 1"):
        LocalExecutor(make_problem(), 0)
    assert cores() >= 1


def test_sigint_is_blocked_while_the_fork_server_starts(make_problem, monkeypatch):
    held = []
    monkeypatch.setattr(local, "ensure_running", lambda: held.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    with LocalExecutor(make_problem(), 1):
        pass
    assert signal.SIGINT in held[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_that_is_killed_is_one_sentence(make_problem):
    """If a worker process is killed, the error suggests fewer `--jobs`, because memory may have run out."""
    problem = make_problem(duration_s=20_000.0)

    async def killed(executor, store):
        evaluation = asyncio.ensure_future(Evaluator(executor, store, str)(trial(problem)))
        while not executor._pool._processes:
            await asyncio.wait({evaluation}, timeout=0.01)
        for process in executor._pool._processes.values():
            process.kill()
        await evaluation

    with (
        EvaluationStore(Path(":memory:")) as store,
        LocalExecutor(problem, 1) as executor,
        pytest.raises(ConfigurationError, match="perhaps out of memory: try fewer --jobs"),
    ):
        asyncio.run(killed(executor, store))
