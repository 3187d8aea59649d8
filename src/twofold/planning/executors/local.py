"""Executor that runs simulations in parallel processes on local CPU cores."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from multiprocessing.sharedctypes import RawValue
from types import ModuleType

from twofold.errors import require
from twofold.planning.evaluation import SimulatedTrial, Trial
from twofold.planning.evaluator import Executor
from twofold.planning.problem import Problem
from twofold.planning.trials import try_trial


def cores() -> int:
    return len(os.sched_getaffinity(0))


class LocalExecutor(Executor):
    """Executor that runs simulations in `jobs` processes. Leaving the context manager cancels unfinished ones."""

    def __init__(self, problem: Problem, jobs: int) -> None:
        require(jobs >= 1, f"--jobs must be at least 1, not {jobs}")
        self._leaving = RawValue(ctypes.c_bool, False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        _start_server()
        self._pool = ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_begin, initargs=(problem, self._leaving)
        )

    def submit(self, trial: Trial) -> Future[SimulatedTrial | str]:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:  # a worker that this call starts would otherwise run the caller's script again
            return self._pool.submit(_run, trial)
        finally:
            sys.modules["__main__"] = main

    def __exit__(self, *_exception: object) -> None:
        self._leaving.value = True
        self._pool.shutdown(wait=True, cancel_futures=True)


def _start_server() -> None:
    """Start the fork server with SIGINT blocked."""
    # Ctrl-C during the start would print a traceback.
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


# -- in a worker ----------------------------------------------------------------------------------------------------

_problem: Problem
_abandoned: Callable[[], bool]


def _begin(problem: Problem, leaving: "ctypes.c_bool") -> None:
    """Initialize a worker process."""
    global _problem, _abandoned  # noqa: PLW0603 (state of the worker process)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _problem = problem
    _abandoned = lambda: bool(leaving.value)  # noqa: E731
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(parent: int) -> None:
    wait([parent])
    os._exit(1)


def _run(trial: Trial) -> SimulatedTrial | str:
    return try_trial(_problem, trial, _abandoned)
