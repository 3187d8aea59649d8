"""Plans: the best cluster design for each choice of machine types.

A plan can also contain a break-even request rate. Up to about this rate, machines that run both prefill and
decode cost no more than separate machines for prefill and decode.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress

import msgspec
from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.planning.design import Budget, Design, Family, FamilyGroup, RatedDesign, frontier
from twofold.planning.evaluation import Evaluation
from twofold.planning.promise import Draws, Promise, Rank, promised_rate, promised_size, resized
from twofold.planning.rates import MaxRate, RateSearch
from twofold.planning.search import Objective, break_even, cheapest, most_throughput
from twofold.simulation.result import Check


def require_room(families: Sequence[Family], budget: Budget, *, bounded: bool) -> None:
    """Raise ConfigurationError if no design fits in the budget.

    If `bounded` is true, also raise ConfigurationError for a budget that leaves the number of machines unlimited.
    """
    budget.require_sensible()
    if bounded and not all(budget.bounds(family) for family in families):
        raise ConfigurationError(
            "the objective throughput needs a budget: give --max-machines, --max-cost or --max-power"
        )
    smallest = [family.smallest for family in families]
    if not any(budget.allows(design) for design in smallest):
        least = min(smallest, key=lambda design: (design.machines, design.price_per_h))
        raise ConfigurationError(
            f"the budget is too small: even {least.name}, one machine per phase, needs {_takes(least)}"
            if least.family.split
            else f"the budget is too small: even {least.name} needs {_takes(least)}"
        )


async def unmet(
    search: RateSearch, families: Sequence[Family], budget: Budget, rate: float | None
) -> ConfigurationError:
    """Create the error for a plan in which no design meets the SLO."""
    largest = [design for family in families for design in _largest(search, family, budget, rate)]
    told = await asyncio.gather(*(search.at(design, search.lowest(design)) for design in largest))
    idle = list(zip(largest, told, strict=True))
    able = [design for design, evaluation in idle if evaluation.met]
    if able and rate is not None:  # the rate is too high
        return await _too_much(search, able, rate)
    design, evaluation = min(idle, key=lambda each: _worst(each[1])[0])
    return ConfigurationError(
        f"no design meets the SLO: even {design.name}, nearly idle, has {_described(_worst(evaluation)[1])}; "
        f"relax the SLO or plan with other machines"
    )


async def _too_much(search: RateSearch, designs: Sequence[Design], rate: float) -> ConfigurationError:
    best = max(await search.highest_of(designs), key=lambda each: (each.rate, each.design.name))
    return ConfigurationError(
        f"no design within the budget meets the SLO at {rate:g} requests/s: {best.design.name} meets it up to "
        f"{best.rate:.3g}; allow more machines or plan for a lower rate"
    )


def _described(check: Check) -> str:
    """Describe a missed SLO check in words."""
    if check.at_least:
        return f"{check.value or 0.0:.1%} of {check.name}, below the required {check.bound:.1%}"
    unit = "×" if "slowdown" in check.name else " s"
    return f"a {check.name} of {check.value or 0.0:.3g}{unit}, above the bound of {check.bound:.3g}{unit}"


def _largest(search: RateSearch, family: Family, budget: Budget, rate: float | None) -> list[Design]:
    if budget.bounds(family):
        designs = frontier(family, budget.allows)
    else:
        counts = search.bound.suggest(family, rate or 1.0)
        designs = [Design(family=family, counts=counts)]
    return sorted(designs, key=lambda design: (-search.bound.estimate(design), design.name))[:1]


def _worst(evaluation: Evaluation) -> tuple[float, Check]:
    """Return the SLO check that is missed by the largest factor, and this factor."""
    # Attainment is considered only if no latency check is missed.
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
    price = f", ${design.price_per_h:,.2f} per hour" if design.price_per_h else ""
    return f"{machines}{price} and {design.tdp_w / 1e3:,.1f} kW"


class PlanQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Goal of a plan: objective, design families, budget and rate (requests/s)."""

    objective: Objective
    groups: tuple[FamilyGroup, ...]
    budget: Budget = Budget()
    rate: float | None = None  # required for lowest cost or power, None for highest throughput
    draws: Draws | None = None  # to check the best designs on; None for no check


class DesignChoice(RatedDesign, frozen=True, kw_only=True):
    """A design, such as the best of its group, evaluated at `rate`: the requested rate, or else the highest rate.

    Without a promise, the design meets the SLO on the draw of the search.
    """

    highest_rate: float
    evaluation: Evaluation
    promise: Promise | None = None
    copies: int = 1  # of a placement, for the requested rate

    @property
    def broken(self) -> bool:
        """Whether too few draws of the workload meet the SLO."""
        return self.promise is not None and not self.promise.holds

    @property
    def accelerators(self) -> int:
        return self.copies * self.design.accelerators

    @property
    def requests_per_dollar(self) -> float | None:
        """Requests per dollar at the highest rate; None if the price is unknown."""
        price = self.design.price_per_h
        return 3600 * self.highest_rate / price if price else None

    @property
    def requests_per_kwh(self) -> float | None:
        """Requests per kWh at the highest rate and the provisioned power; None if this power is unknown."""
        return 3.6e6 * self.highest_rate / self.design.tdp_w if self.design.tdp_w else None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Ranking of the designs that meet the SLO, with only the best design of each group."""

    query: PlanQuery
    choices: tuple[DesignChoice, ...]
    without: tuple[str, ...]  # names of the groups without a design that meets the SLO
    no_room: tuple[str, ...]  # names of the groups without a design in the budget
    # Up to about this rate, at most the plan's rate, the cheapest colocated design costs no more than the cheapest
    # split design. None if splitting pays at all searched rates, or if only one kind of design meets the SLO.
    break_even: float | None

    @property
    def best(self) -> DesignChoice:
        return self.choices[0]

    @property
    def best_split(self) -> DesignChoice | None:
        return next((choice for choice in self.choices if choice.design.family.split), None)

    @property
    def best_of_both(self) -> list[DesignChoice]:
        """The best split and the best colocated design, if they exist."""
        return [choice for choice in (self.best_split, self.best_colocated) if choice is not None]

    @property
    def best_colocated(self) -> DesignChoice | None:
        return next((choice for choice in self.choices if not choice.design.family.split), None)


Found = Callable[[DesignChoice], None]


async def make_plan(search: RateSearch, query: PlanQuery, found: Found = lambda _: None) -> Plan:
    """Find each group's best design, and call `found` with it. Raises ConfigurationError if none meets the SLO."""
    bounded = query.objective is Objective.THROUGHPUT
    require_room(list(chain.from_iterable(query.groups)), query.budget, bounded=bounded)
    roomy = [any(query.budget.allows(family.smallest) for family in group) for group in query.groups]
    # The most parallelism has the least latency: it stands for a group that cannot meet the SLO.
    groups = [tuple(filter(search.bound.feasible, group)) or group[-1:] for group in compress(query.groups, roomy)]
    told = await asyncio.gather(*(_choose(search, query, group, found) for group in groups))
    choices = sorted((choice for choice in told if choice is not None), key=partial(_rank, query.objective))
    if not choices:
        raise await unmet(search, [group[-1] for group in groups], query.budget, query.rate)
    if query.draws is not None:
        choices = await _promised(search, query, choices, query.draws)
    return Plan(
        query=query,
        choices=tuple(choices),
        without=tuple(group[0].group for group, choice in zip(groups, told, strict=True) if choice is None),
        no_room=tuple(group[0].group for group, room in zip(query.groups, roomy, strict=True) if not room),
        break_even=await _break_even(search, query, choices),
    )


async def _choose(search: RateSearch, query: PlanQuery, group: FamilyGroup, found: Found) -> DesignChoice | None:
    budget = query.budget
    if query.objective is Objective.THROUGHPUT:
        frontiers = [designs for family in group if (designs := frontier(family, budget.allows))]
        choice = at_capacity(await most_throughput(search, *frontiers)) if frontiers else None
    else:
        rate = query.rate or 0.0
        design = await cheapest(search, group, rate, budget.allows, query.objective.weigh)
        choice = None if design is None else await _at_rate(search, design, rate)
    if choice is not None:
        found(choice)
    return choice


async def _promised(
    search: RateSearch, query: PlanQuery, choices: Sequence[DesignChoice], draws: Draws
) -> list[DesignChoice]:
    """Resize the best split and colocated designs so that enough draws meet the SLO; list them first."""

    def rank(choice: DesignChoice) -> Rank:
        return choice.broken, *_rank(query.objective, choice)

    async def resize(choice: DesignChoice) -> DesignChoice:
        design, rate = choice.design, choice.rate
        if query.objective is Objective.THROUGHPUT:
            rate, promise = await promised_rate(search, design, rate, draws)
            evaluation = await search.at_rate(design, rate)
            return replace(choice, rate=rate, highest_rate=rate, evaluation=evaluation, promise=promise)
        limits = query.budget.allows, query.objective.weigh
        design, promise = await promised_size(search, design, rate, draws, *limits)
        found = choice if design == choice.design else await _at_rate(search, design, rate)
        return replace(found, promise=promise)

    kinds = [[each for each in choices if each.design.family.split is split] for split in (True, False)]
    told = await asyncio.gather(*(resized(kind, resize, rank) for kind in kinds))
    return sorted(chain.from_iterable(told), key=lambda choice: (choice.promise is None, *rank(choice)))


def at_capacity(capacity: MaxRate) -> DesignChoice | None:
    """Return a design at its highest rate; None if it meets the SLO at no rate."""
    rate, evaluation = capacity.rate, capacity.kept
    if evaluation is None:
        return None
    return DesignChoice(design=capacity.design, rate=rate, highest_rate=rate, evaluation=evaluation)


async def _at_rate(search: RateSearch, design: Design, rate: float) -> DesignChoice:
    evaluation = await search.at_rate(design, rate)
    capacity = await search.highest(design, search.grid.step(rate))
    return DesignChoice(design=design, rate=rate, highest_rate=max(rate, capacity.rate), evaluation=evaluation)


async def _break_even(search: RateSearch, query: PlanQuery, choices: Sequence[DesignChoice]) -> float | None:
    kinds = [choice.design.family for choice in choices]
    if len({family.split for family in kinds}) < 2:
        return None
    top = query.rate or choices[0].rate
    # The budget is ignored.
    return await break_even(search, kinds, top, query.objective.weigh)


def _rank(objective: Objective, choice: DesignChoice) -> Rank:
    design = choice.design
    if objective is Objective.THROUGHPUT:
        return -choice.rate, design.price_per_h, design.tdp_w, design.family.split, design.machines, design.name
    return (*objective.weigh(design), design.family.split, -choice.highest_rate, design.name)
