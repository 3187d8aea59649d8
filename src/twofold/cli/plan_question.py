"""From flags to what is to be planned."""

import math
from collections.abc import Sequence
from pathlib import Path

import typer

from twofold.cli.simulate_source import require_an_end
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.planning.design import Budget
from twofold.planning.plan import PlanQuery
from twofold.planning.problem import Problem, fitting, parse_families
from twofold.planning.search import Objective
from twofold.planning.workload import WorkloadArguments
from twofold.slo import Slo, SlowdownSlo

_MOST_RATE = 1e6  # requests per second: a trial of this many takes minutes, and a plan hundreds of trials


def read_problem(
    template: ClusterSpec,
    workload: WorkloadArguments,
    *,
    slo: Slo | SlowdownSlo,
    attainment: float,
    reference: str,
    tensor_parallel: int | None,
    catalog: Sequence[Path],
) -> Problem:
    """The problem; raises ConfigurationError for what the catalog does not know and for numbers that cannot be."""
    known = load_catalog(catalog)
    known.model(template.model)
    problem = Problem(
        template=template,
        workload=workload,
        slo=slo,
        attainment=attainment,
        reference=known.machine(reference).name,
        tensor_parallel=tensor_parallel,
        catalog=known,
    )
    problem.require_sensible()
    require_an_end(
        rate=None,
        duration_s=workload.duration_s,
        burstiness=workload.burstiness,
        length_scale=workload.length_scale,
    )
    return problem


def read_question(
    problem: Problem,
    *,
    objective: Objective,
    rate: float | None,
    families: Sequence[str],
    machines: str | None,
    split: bool,
    colocated: bool,
    max_machines: str | None,
    max_cost: float | None,
    max_power_kw: float | None,
) -> PlanQuery:
    """What to search for; machines that do not hold the model are left out with a note on stderr."""
    wanted = parse_families(problem, families, machines, split=split, colocated=colocated)
    fit, reasons = fitting(problem, wanted)
    for reason in reasons:
        typer.echo(f"note: left out: {reason}", err=True)
    most, of_kind = _parse_machines(problem, max_machines)
    budget = Budget(
        machines=most,
        price_per_h=max_cost,
        tdp_w=None if max_power_kw is None else max_power_kw * 1e3,
        of_kind=of_kind,
    )
    budget.require_sensible()
    return PlanQuery(objective=objective, families=fit, budget=budget, rate=_checked_rate(objective, rate))


def parse_objective(text: str) -> Objective:
    """Raises ConfigurationError for what is no objective."""
    try:
        return Objective(text.strip().lower())
    except ValueError:
        raise ConfigurationError(f"--objective {text!r} is not one of {', '.join(Objective)}") from None


def _checked_rate(objective: Objective, rate: float | None) -> float | None:
    if objective is Objective.THROUGHPUT:
        if rate is not None:
            raise ConfigurationError(
                "--rate is what --objective throughput looks for: leave it out, or ask for cost or power"
            )
        return None
    if rate is None:
        raise ConfigurationError(f"--objective {objective} needs --rate: the requests per second to plan for")
    if not 0 < rate < math.inf:
        raise ConfigurationError(f"--rate {rate:g} cannot be: give more than 0 requests per second")
    if rate > _MOST_RATE:
        raise ConfigurationError(f"--rate {rate:g} is too much to plan for: give at most {_MOST_RATE:g}")
    return rate


def _parse_machines(problem: Problem, text: str | None) -> tuple[int | None, dict[str, int]]:
    """(of all kinds, of each kind) of `40`, of `a100=30,h100=20`, or of both."""
    most, of_kind = None, {}
    for word in filter(None, (text or "").split(",")):
        name, equals, number = word.rpartition("=")
        try:
            count = int(number)
        except ValueError:
            raise ConfigurationError(
                f"--max-machines {word!r} is not understood: write 40, or a100=30,h100=20"
            ) from None
        if equals:
            kind = problem.kind(name.strip()).name
            if kind in of_kind:
                raise ConfigurationError(f"--max-machines says twice how many {kind} there may be")
            of_kind[kind] = count
        else:
            most = count
    return most, of_kind
