"""What decides the result of a trial, as a fingerprint: equal keys mean equal results."""

import hashlib
from functools import cache
from importlib.resources import files

import msgspec

from twofold import __version__
from twofold.planning.evaluation import Trial
from twofold.planning.problem import Problem
from twofold.simulation.simulate import VERSION
from twofold.slo import SlowdownSlo

# Changes with what an evaluation holds, or how it is come by.
_EVALUATION = 2
_DATA = (("twofold.performance", "data"), ("twofold.workload", "data"))


class Keys:
    """Keys of trials of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._common = hashlib.sha256(_canonical(_facts(problem))).hexdigest()

    def of(self, trial: Trial) -> str:
        """A key; the code, the data, the problem, the machines' own figures and the rate are in it."""
        spec = self._problem.spec(trial.design)
        machines = [self._problem.catalog.machine(pool.machine) for pool in spec.pools]
        facts = [self._common, spec, machines, trial.rate, trial.draw, trial.design.family.judged]
        return hashlib.sha256(_canonical(facts)).hexdigest()


def _facts(problem: Problem) -> list[object]:
    reference = problem.catalog.machine(problem.reference) if isinstance(problem.slo, SlowdownSlo) else None
    return [
        {"twofold": __version__, "simulation": VERSION, "evaluation": _EVALUATION, "data": _data_digest()},
        problem.catalog.model(problem.template.model),
        problem.workload,
        problem.workload.digest(),
        type(problem.slo).__name__,
        problem.slo,
        problem.attainment,
        reference,
    ]


def _canonical(facts: object) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(facts, str_keys=True), order="sorted")


@cache
def _data_digest() -> str:
    """A fingerprint of the figures that come with the package."""
    digest = hashlib.sha256()
    for package, folder in _DATA:
        for file in sorted(files(package).joinpath(folder).iterdir(), key=lambda each: each.name):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
