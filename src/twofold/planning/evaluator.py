"""Evaluation of cluster designs by simulation, with a store of results that later plans reuse."""

import asyncio
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from twofold import __version__
from twofold.errors import ConfigurationError, require
from twofold.performance.profile import load_profiles
from twofold.planning.evaluation import Evaluation, SimulatedTrial, Trial
from twofold.planning.problem import Problem
from twofold.simulation.simulate import VERSION
from twofold.slo import SlowdownSlo


class Executor(AbstractContextManager["Executor"], Protocol):
    """Runs simulations in parallel, as a context manager that cancels waiting simulations on exit."""

    def submit(self, trial: Trial) -> Future[SimulatedTrial | str]:
        """Submit a simulation. Return the future of its result: an error message if it raises UserError."""
        ...


# Incremented when the content or computation of evaluations changes.
_EVALUATION = 4
_DATA = (("twofold.performance", "data"), ("twofold.workload", "data"))


class Keys:
    """Storage keys for the simulations of one plan. Simulations with equal keys have equal results."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._common = hashlib.sha256(_canonical(_facts(problem))).hexdigest()

    def of(self, trial: Trial) -> str:
        """Return the key of a simulation: a hash of its inputs, the code version and the package's data files."""
        spec = self._problem.spec(trial.design)
        machines = [self._problem.catalog.machine(pool.machine) for pool in spec.pools]
        facts = [self._common, spec, machines, trial.rate, trial.draw, trial.design.family.judged]
        return hashlib.sha256(_canonical(facts)).hexdigest()


def _facts(problem: Problem) -> list[object]:
    reference = problem.catalog.machine(problem.reference) if isinstance(problem.slo, SlowdownSlo) else None
    return [
        {"twofold": __version__, "simulation": VERSION, "evaluation": _EVALUATION, "data": _data_digest()},
        problem.catalog.model(problem.template.model),
        replace(problem.workload, workload=problem.workload.digest() or problem.workload.workload),
        type(problem.slo).__name__,
        problem.slo,
        problem.attainment,
        reference,
        load_profiles(problem.template.profiles),
    ]


def _canonical(facts: object) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(facts, str_keys=True), order="sorted")


@cache
def _data_digest() -> str:
    """Return a hash of the package's data files on performance and workloads."""
    digest = hashlib.sha256()
    for package, folder in _DATA:
        for file in sorted(files(package).joinpath(folder).iterdir(), key=lambda each: each.name):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


_LAYOUT = 1
_BUSY_S = 30.0  # wait for another plan writing to the same file
_CREATE = "CREATE TABLE IF NOT EXISTS evaluations (key TEXT PRIMARY KEY, trial TEXT NOT NULL, evaluation BLOB NOT NULL)"


class EvaluationStore(AbstractContextManager["EvaluationStore"]):
    """Store of results in a SQLite file that several processes may use. Raises ConfigurationError if it is unusable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            (layout,) = self._database.execute("PRAGMA user_version").fetchone()
            require(layout in {0, _LAYOUT}, f"{path} was written by another version of Twofold: choose another --store")
            if not layout and self._tables() - {"evaluations"}:
                raise ConfigurationError(f"{path} is a database of another program: choose another --store")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(_CREATE)
            self._database.execute(f"PRAGMA user_version={_LAYOUT}")

    def _tables(self) -> set[str]:
        rows = self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows}

    def get(self, key: str) -> Evaluation | None:
        with self._explained():
            row = self._database.execute("SELECT evaluation FROM evaluations WHERE key = ?", (key,)).fetchone()
            return None if row is None else msgspec.json.decode(row[0], type=Evaluation)

    def put(self, key: str, trial: str, evaluation: Evaluation) -> None:
        with self._explained():
            self._database.execute(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)", (key, trial, msgspec.json.encode(evaluation))
            )

    def __exit__(self, *_exception: object) -> None:
        self._database.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"store {self._path} cannot be used: {reason}") from error


class Effort(msgspec.Struct, kw_only=True):
    """Effort of a search: simulations, evaluations reused from the store, simulated requests and CPU seconds."""

    simulations: int = 0
    reused: int = 0
    requests: int = 0  # in new simulations
    cpu_s: float = 0.0

    @property
    def requests_per_cpu_s(self) -> float | None:
        return self.requests / self.cpu_s if self.cpu_s > 0 else None


Listener = Callable[[Effort, Trial, Evaluation], None]


class Evaluator:
    """Runs simulations with an executor and stores their results. Each simulation runs at most once."""

    def __init__(
        self, executor: Executor, store: EvaluationStore, key: Callable[[Trial], str], listener: Listener | None = None
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
        """Return the evaluations of all finished simulations, sorted by design name and rate."""
        done = [(trial, asked.result()) for trial, asked in self._asked.items() if asked.done()]
        return dict(sorted(done, key=lambda each: (each[0].design.name, each[0].rate)))

    async def _answer(self, trial: Trial) -> Evaluation:
        key = self._key(trial)
        evaluation = self._store.get(key)
        if evaluation is not None:
            self.effort.reused += 1
        else:
            simulated = await self._simulated(trial)
            evaluation = simulated.evaluation
            self._store.put(key, f"{trial.design.name} at {trial.rate:g}/s", evaluation)
            self.effort.simulations += 1
            self.effort.requests += evaluation.requests
            self.effort.cpu_s += simulated.cpu_s
        if self._listener is not None:
            self._listener(self.effort, trial, evaluation)
        return evaluation

    async def _simulated(self, trial: Trial) -> SimulatedTrial:
        try:
            simulated = await asyncio.wrap_future(self._executor.submit(trial))
        except BrokenExecutor as error:
            raise ConfigurationError(
                "a worker process ended, perhaps out of memory: try fewer --jobs; finished simulations are stored"
            ) from error
        if isinstance(simulated, str):
            raise ConfigurationError(simulated)
        return simulated
