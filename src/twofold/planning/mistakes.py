"""Why there is no plan, in one sentence."""

import asyncio
from collections.abc import Sequence

from twofold.errors import ConfigurationError
from twofold.planning.budget import Budget, frontier
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Evaluation
from twofold.planning.rates import RateSearch
from twofold.simulation.verdict import Check


def require_room(families: Sequence[Family], budget: Budget, *, bounded: bool) -> None:
    """Raise ConfigurationError where the budget holds not even the smallest design, or, if `bounded`, has no end."""
    budget.require_sensible()
    if bounded and not all(budget.bounds(family) for family in families):
        raise ConfigurationError(
            "the most throughput of what? Give a budget: --max-machines, --max-cost or --max-power"
        )
    smallest = [Design(family=family, counts=(1,) * len(family.kinds)) for family in families]
    if not any(budget.allows(design) for design in smallest):
        least = min(smallest, key=lambda design: (design.machines, design.price_per_h))
        raise ConfigurationError(
            f"the budget is too small: even {least.name}, one machine of each phase, takes {_takes(least)}"
            if least.family.split
            else f"the budget is too small: even {least.name} takes {_takes(least)}"
        )


async def unmet(
    search: RateSearch, families: Sequence[Family], budget: Budget, rate: float | None
) -> ConfigurationError:
    """The error where no family can keep the SLO: by how much the best one misses it when all but idle."""
    largest = [design for family in families for design in _largest(search, family, budget, rate)]
    told = await asyncio.gather(*(search.at(design, search.lowest(design)) for design in largest))
    idle = list(zip(largest, told, strict=True))
    able = [design for design, evaluation in idle if evaluation.met]
    if able and rate is not None:
        return await _too_much(search, able, rate)
    design, evaluation = min(idle, key=lambda each: _worst(each[1])[0])
    return ConfigurationError(
        f"no design can keep this SLO: even {design.name}, all but idle, has {_described(_worst(evaluation)[1])}; "
        f"loosen the SLO or plan with other machines"
    )


async def _too_much(search: RateSearch, designs: Sequence[Design], rate: float) -> ConfigurationError:
    """The SLO can be kept, but not at this rate."""
    capacities = await asyncio.gather(*(search.highest(design) for design in designs))
    steps = [(capacity.step, capacity.design.name) for capacity in capacities if capacity.step is not None]
    step, name = max(steps, key=lambda each: (each[0], each[1]))
    return ConfigurationError(
        f"no design within the budget keeps the SLO at {rate:g} requests/s: {name} keeps it up to "
        f"{search.grid.rate(step):.3g}; allow more machines or plan for a lower rate"
    )


def _described(check: Check) -> str:
    """`a TPOT slowdown P50 of 1.9×, where at most 1.25× is asked for`, or a share of requests, or seconds."""
    if check.at_least:
        return f"{check.value or 0.0:.1%} of {check.name}, where {check.bound:.1%} are asked for"
    unit = "×" if "slowdown" in check.name else " s"
    return f"a {check.name} of {check.value or 0.0:.3g}{unit}, where at most {check.bound:.3g}{unit} is asked for"


def _largest(search: RateSearch, family: Family, budget: Budget, rate: float | None) -> list[Design]:
    """The design of the family that is likeliest to keep the SLO: the budget's largest, else a sufficient one."""
    if budget.bounds(family):
        designs = frontier(family, budget.allows)
    else:
        counts = search.bound.suggest(family, rate or 1.0)
        designs = [Design(family=family, counts=counts)]
    return sorted(designs, key=lambda design: (-search.bound.estimate(design), design.name))[:1]


def _worst(evaluation: Evaluation) -> tuple[float, Check]:
    """(by which factor, which check) of the bound that is missed most; a share only where no ceiling is missed."""
    missed = [check for check in evaluation.checks if not check.met] or list(evaluation.checks)
    ceilings = [check for check in missed if not check.at_least] or missed
    return max(((_excess(check), check) for check in ceilings), key=lambda each: each[0])


def _excess(check: Check) -> float:
    value = check.value
    if value is None:
        return 0.0
    if check.at_least:
        return check.bound / value if value else float("inf")
    return value / check.bound


def _takes(design: Design) -> str:
    machines = f"{design.machines} machine{'s'[: design.machines != 1]}"
    return f"{machines}, ${design.price_per_h:,.2f} per hour and {design.tdp_w / 1e3:,.1f} kW"
