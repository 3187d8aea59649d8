"""Conversion of the flags of `twofold plan` to the inputs of the planner."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import typer

from twofold.cli.plan.settings import PlanSettings
from twofold.cli.simulate.spec import link_bytes_per_s
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import load_profiles
from twofold.planning.design import Budget
from twofold.planning.executors.ray import ray_inventory
from twofold.planning.plan import PlanQuery
from twofold.planning.problem import SPLIT_ROUTERS, Problem, parse_families, with_parallelism
from twofold.planning.promise import Draws
from twofold.planning.search import Objective
from twofold.planning.workload import WorkloadArguments
from twofold.raycluster.cluster import connect, list_nodes
from twofold.reporting.output import same_fields

REFERENCE: Final = "dgx-a100"


def read_problem(settings: PlanSettings) -> Problem:
    """Convert the flags to the model, workload and SLO to plan for. Raises ConfigurationError for invalid flags."""
    catalog = load_catalog(settings.catalog)
    measured = load_profiles(_absolute(settings.profiles))
    for each in measured:
        catalog = each.extend(catalog)
    model = settings.model or (measured[0].model.name if measured else None)
    if model is None:
        raise ConfigurationError("give --model, as in bloom-176b, or --profile")
    catalog.model(model)
    template = _template(settings, model)
    problem = Problem(
        template=template,
        workload=WorkloadArguments(
            workload=settings.workload,
            duration_s=settings.duration,
            min_requests=settings.requests_per_trial,
            **settings.shape(),
        ),
        slo=settings.slo,
        attainment=settings.attainment,
        reference=catalog.machine(settings.reference or (measured[0].machine if measured else REFERENCE)).name,
        tensor_parallel=settings.tp,
        batchers=settings.batcher or {},
        split_routers=(None,) if settings.router or template.router != "splitwise" else SPLIT_ROUTERS,
        catalog=catalog,
    )
    problem.require_sensible()
    return problem


def read_query(problem: Problem, settings: PlanSettings) -> PlanQuery:
    """Convert the flags to the objective, designs and budget of a plan. Raises ConfigurationError for invalid flags."""
    require(settings.max_gpus is None, "--max-gpus needs --objective goodput; other objectives use --max-machines")
    objective = Objective(settings.objective)
    wanted = parse_families(
        problem, settings.family, settings.machines, split=settings.split, colocated=settings.colocated
    )
    groups, reasons = with_parallelism(problem, wanted)
    for reason in reasons:
        typer.echo(f"note: left out: {reason}", err=True)
    if objective is Objective.COST or settings.max_cost is not None:
        kinds = {kind for group in groups for family in group for kind in family.kinds}
        unknown = min((kind.name for kind in kinds if not kind.price_per_h), default=None)
        require(unknown is None, f"the price of {unknown} is unknown: give it in a catalog file with --catalog")
    machines, of_kind = _parse_machines(problem, settings.max_machines)
    budget = Budget(
        machines=machines,
        price_per_h=settings.max_cost,
        tdp_w=None if settings.max_power is None else settings.max_power * 1e3,
        of_kind=of_kind,
    )
    budget.require_sensible()
    return PlanQuery(
        objective=objective,
        groups=groups,
        budget=budget,
        rate=_checked_rate(objective, settings.rate),
        draws=read_draws(problem, settings),
    )


def read_draws(problem: Problem, settings: PlanSettings) -> Draws | None:
    """Convert the flags to the draws for checks; None for no check. Raises ConfigurationError for too few draws."""
    numbers, whole = tuple(range(1, settings.draws + 1)), not problem.workload.random
    return Draws(confidence=settings.confidence, numbers=numbers, whole=whole) if numbers else None


def with_ray_machines(problem: Problem, settings: PlanSettings) -> PlanSettings:
    """Add the machines of the Ray cluster at --ray to the settings, unless other flags name machines.

    Raises ConfigurationError if the cluster is unreachable or has no suitable node.
    """
    named = settings.family or settings.machines or settings.max_machines or settings.max_gpus
    if settings.ray is None or named:
        return settings
    inventory = ray_inventory(list_nodes(connect(settings.ray, "--ray")), problem.catalog)
    for reason in inventory.left_out:
        typer.echo(f"note: left out: {reason}", err=True)
    found = inventory.accelerators if settings.goodput else inventory.machines
    if inventory.accelerators and not found:
        raise ConfigurationError(
            f"no node of the Ray cluster at {settings.ray} has all accelerators of a machine of the catalog: plan with "
            "--objective goodput, which counts accelerators, or give --machines"
        )
    if not found:  # the catalog has none of the cluster's accelerators
        return settings
    stock = ",".join(f"{name}={count}" for name, count in found.items())
    typer.echo(f"note: planned for the Ray cluster at {settings.ray}: {stock}", err=True)
    if settings.goodput:
        return replace(settings, max_gpus=stock)
    return replace(settings, machines=",".join(found), max_machines=stock)


def with_profile_machines(settings: PlanSettings) -> PlanSettings:
    """Return the settings, with the machines of --profile unless other flags name machines."""
    if not settings.profiles or settings.family or settings.machines:
        return settings
    measured, most = load_profiles(_absolute(settings.profiles)), settings.max_machines
    host = measured[0].host
    # As many workers as fit on the host of the profile.
    if most is None and host is not None:
        most = str(max(1, host.cores // host.threads))
    return replace(settings, machines=",".join(each.machine for each in measured), max_machines=most)


def _template(settings: PlanSettings, model: str) -> ClusterSpec:
    given = same_fields(ClusterSpec, settings, without=("model", "profiles", "router"))
    if settings.link_gb_per_s is not None:
        given["link_bytes_per_s"] = link_bytes_per_s(settings.link_gb_per_s)
    usual = "jsq" if settings.goodput else "splitwise" if settings.kv_cache is None else "conductor"
    return msgspec.structs.replace(
        ClusterSpec(pools=(), model=model, router=settings.router or usual, profiles=_absolute(settings.profiles)),
        **{name: value for name, value in given.items() if value is not None},
    )


def _absolute(profiles: Sequence[Path]) -> tuple[str, ...]:
    return tuple(str(path.absolute()) for path in profiles)


def _checked_rate(objective: Objective, rate: float | None) -> float | None:
    if objective is Objective.THROUGHPUT:
        if rate is not None:
            raise ConfigurationError(
                "--rate is the result of --objective throughput: leave it out, or use --objective cost or power"
            )
        return None
    if rate is None:
        raise ConfigurationError(f"--objective {objective} needs --rate: the requests per second to plan for")
    return rate


def _parse_machines(problem: Problem, text: str | None) -> tuple[int | None, dict[str, int]]:
    most, of_kind = None, {}
    for _, name, count in counts_of(text or "", "--max-machines", "write 40, or a100=30,h100=20"):
        if name is None:
            most = count
        else:
            kind = problem.kind(name).name
            require(kind not in of_kind, f"--max-machines gives {kind} twice")
            of_kind[kind] = count
    return most, of_kind


def counts_of(text: str, flag: str, example: str) -> Iterator[tuple[str, str | None, int]]:
    """Parse counts as in `a100=30,20`: yield each word, its name or None, and its number. Raises ConfigurationError."""
    for word in filter(None, text.split(",")):
        name, equals, number = word.rpartition("=")
        try:
            yield word, name.strip() if equals else None, int(number)
        except ValueError:
            raise ConfigurationError(f"{flag} {word!r} is not understood: {example}") from None
