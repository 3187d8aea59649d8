"""Worker processes give what a simulation here gives, and end when they are no longer needed."""

import asyncio
import signal
import time
from concurrent.futures import CancelledError

import msgspec
import pytest

from twofold.errors import ConfigurationError
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.evaluator import Evaluator, NullStore
from twofold.planning.executors import local
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.trials import simulate_trial


def trial(problem, rate=4.0):
    return Trial(Design(family=Family(kinds=(problem.kind("h100"),) * 2), counts=(2, 2)), rate)


def test_results_are_those_of_this_process(make_problem):
    """Several at a time, each as if it had been run here."""
    problem = make_problem()
    trials = [trial(problem, rate) for rate in (2.0, 4.0, 8.0)]
    with LocalExecutor(problem, 2) as executor:
        futures = [executor.submit(each) for each in trials]
        told = [future.result(600).evaluation for future in futures]
    assert told == [simulate_trial(problem, each).evaluation for each in trials]


def test_a_mistake_of_the_user_travels_as_a_sentence(make_problem):
    """Whatever kind of error it was in the worker."""
    problem = make_problem()
    wrong = msgspec.structs.replace(
        problem, template=msgspec.structs.replace(problem.template, handoff="pigeon")
    )
    with (
        LocalExecutor(wrong, 1) as executor,
        pytest.raises(ConfigurationError, match="pigeon"),
    ):
        asyncio.run(Evaluator(executor, NullStore(), str)(trial(wrong)))


def test_leaving_ends_what_runs(make_problem):
    """A simulation of hours is given up within moments, and what waits is dropped."""
    problem = make_problem(duration_s=20_000.0)
    with LocalExecutor(problem, 1) as executor:
        futures = [executor.submit(trial(problem, rate)) for rate in (10.0, 11.0, 12.0)]
        while not futures[0].running() and not executor._pool._processes:
            time.sleep(0.01)
    assert all(future.done() for future in futures)
    for future in futures:
        with pytest.raises((ConfigurationError, CancelledError)):
            future.result(0)


def test_no_jobs_are_refused(make_problem):
    """And there is at least one core."""
    with pytest.raises(ConfigurationError, match="--jobs must be at least 1"):
        LocalExecutor(make_problem(), 0)
    assert cores() >= 1


def test_ctrl_c_does_not_reach_the_server_while_it_starts(make_problem, monkeypatch):
    """It would print a traceback of its own; this process gets its Ctrl-C back afterwards."""
    held = []
    monkeypatch.setattr(
        local, "ensure_running", lambda: held.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    )
    with LocalExecutor(make_problem(), 1):
        pass
    assert signal.SIGINT in held[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
