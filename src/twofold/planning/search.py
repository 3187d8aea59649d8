"""Searches for the cheapest design, the highest rate, and the break-even rate of split and colocated designs."""

import asyncio
import math
from collections.abc import Callable, Sequence
from enum import StrEnum

from twofold.planning.design import Allows, Budget, Design, Family, frontier
from twofold.planning.evaluation import Evaluation
from twofold.planning.rates import MaxRate, RateSearch
from twofold.request import Phase

# Distances of the neighbours tried around both ends of a bisection: the limiting phase usually, but not always, shows
# the direction, since pools may relieve each other.
_NEIGHBOURS = (1, 2, 4)


async def find_passing(
    search: RateSearch, designs: Sequence[Design], rate: float, start: int | None = None
) -> Design | None:
    """Find a design that meets the SLO at `rate` requests/s, by bisection; None if the search finds no design.

    `designs` must be in ascending order of the number of prefill machines. `start` is the index in `designs`
    at which the bisection starts.
    """
    # A miss caused by prefill rules out all earlier designs; a miss caused by decode, all later designs. Designs with
    # an analytic bound below `rate` are skipped.
    open_places = [place for place, design in enumerate(designs) if search.could(design, rate)]
    if not open_places:
        return None
    tried: dict[int, Evaluation] = {}
    wanted = start if start is not None else _best_estimate(search, designs, open_places)
    first = last = place = min(open_places, key=lambda each: abs(each - wanted))
    low, high = open_places[0], open_places[-1]
    while low <= high:
        tried[place] = told = await search.at_rate(designs[place], rate)
        if told.met:
            return designs[place]
        last = place
        if told.bound_by is Phase.PREFILL:
            low = place + 1
        elif told.bound_by is Phase.DECODE:
            high = place - 1
        else:
            break
        between = [each for each in open_places if low <= each <= high]
        if not between:
            break
        place = between[len(between) // 2]
    near = {end + sign * by for end in (first, last) for sign in (-1, 1) for by in _NEIGHBOURS}
    return await _among(search, designs, rate, sorted(near & set(open_places) - set(tried)))


async def _among(search: RateSearch, designs: Sequence[Design], rate: float, places: Sequence[int]) -> Design | None:
    told = await asyncio.gather(*(search.at_rate(designs[place], rate) for place in places))
    passed = (designs[place] for place, each in zip(places, told, strict=True) if each.met)
    return next(passed, None)


def _best_estimate(search: RateSearch, designs: Sequence[Design], places: Sequence[int]) -> int:
    return max(places, key=lambda place: (search.bound.estimate(designs[place]), -place))


# Cost to minimise, followed by tie breakers; it must grow with every machine.
CostFunction = Callable[[Design], tuple[float, ...]]

# If a design this many times the analytic suggestion fails, more machines do not help.
_GROWTH = (1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 8.0)


def by_price(design: Design) -> tuple[float, ...]:
    return design.price_per_h, design.tdp_w, design.machines


def by_power(design: Design) -> tuple[float, ...]:
    return design.tdp_w, design.price_per_h, design.machines


def by_accelerators(design: Design) -> tuple[float, ...]:
    return design.accelerators, design.price_per_h, design.machines


async def cheapest(
    search: RateSearch, families: Sequence[Family], rate: float, allows: Allows, weigh: CostFunction
) -> Design | None:
    """Return the cheapest design of several families that meets the SLO at `rate` requests/s, or None."""

    def suggested(family: Family) -> tuple[float, ...]:
        return weigh(Design(family=family, counts=search.bound.suggest(family, rate)))

    # The first families are likely to have a cheap design, which leaves few designs to try in the others.
    best: Design | None = None
    for family in sorted(families, key=suggested):
        if best is None:
            found = await _first(search, family, rate, allows)
        else:
            found = await _cheaper(search, family, rate, allows, weigh, best)
        # Remove unneeded machines from a passing design, look for a cheaper passing design, and repeat.
        while found is not None:
            best = await _shrunk(search, found, rate)
            found = await _cheaper(search, family, rate, allows, weigh, best)
    return best


async def _cheaper(
    search: RateSearch, family: Family, rate: float, allows: Allows, weigh: CostFunction, best: Design
) -> Design | None:
    """Return a design of `family` that meets the SLO and is cheaper than `best`; None if the search finds none."""
    limit = weigh(best)
    lighter = frontier(family, lambda design: allows(design) and weigh(design) < limit)
    if not lighter:
        return None
    nearest = min(range(len(lighter)), key=lambda place: abs(lighter[place].counts[0] - best.counts[0]))
    return await find_passing(search, lighter, rate, nearest if best.family == family else None)


async def _first(search: RateSearch, family: Family, rate: float, allows: Allows) -> Design | None:
    """Return a design within the budget that meets the SLO; None if the search finds none."""
    suggested = search.bound.suggest(family, rate)
    most = _grown(family, suggested, _GROWTH[-1])
    for growth in _GROWTH:
        design = _grown(family, suggested, growth)
        if not allows(design):
            largest = frontier(family, lambda design: allows(design) and _within(design, most))
            return await find_passing(search, largest, rate) if largest else None
        if await _passes(search, design, rate):
            return design
    return None


async def _shrunk(search: RateSearch, design: Design, rate: float) -> Design:
    """Reduce a design to the fewest machines that meet the SLO."""
    for place in reversed(range(len(design.counts))):  # the last kind first
        low, high = 0, design.counts[place]  # too few, enough
        while high - low > 1:
            middle = (low + high) // 2
            passes = await _passes(search, _with(design, place, middle), rate)
            low, high = (low, middle) if passes else (middle, high)
        design = _with(design, place, high)
    return design


async def _passes(search: RateSearch, design: Design, rate: float) -> bool:
    return search.could(design, rate) and (await search.at_rate(design, rate)).met


def _grown(family: Family, counts: tuple[int, ...], by: float) -> Design:
    return Design(family=family, counts=tuple(math.ceil(count * by) for count in counts))


def _with(design: Design, place: int, count: int) -> Design:
    counts = tuple(count if at == place else other for at, other in enumerate(design.counts))
    return Design(family=design.family, counts=counts)


def _within(design: Design, most: Design) -> bool:
    return all(mine <= top for mine, top in zip(design.counts, most.counts, strict=True))


async def most_throughput(search: RateSearch, *frontiers: Sequence[Design]) -> MaxRate:
    """Find the design with the highest rate in `frontiers`. Each has the designs of a family, and none is empty."""
    # One simulation per design tests whether it beats the best design by a grid step; only then is its highest rate
    # searched.
    guesses = [designs[_best_estimate(search, designs, range(len(designs)))] for designs in frontiers]
    order = sorted(range(len(frontiers)), key=lambda place: -search.bound.estimate(guesses[place]))
    best = await search.highest(guesses[order[0]])
    for designs in (frontiers[place] for place in order):
        while True:
            # If the first guess never meets the SLO, another design may, at the lowest step of all designs.
            to_beat = min(map(search.lowest, designs)) if best.step is None else best.step + 1
            start = designs.index(best.design) if best.design in designs else None
            better = await find_passing(search, designs, search.grid.rate(to_beat), start)
            if better is None:
                break
            best = await search.highest(better, to_beat)
    return best


_RUNG = 2.0  # ratio of successive rates on the way down
_CLOSE = 1.1  # precision of the break-even rate


async def break_even(search: RateSearch, families: Sequence[Family], rate: float, weigh: CostFunction) -> float | None:
    """Return the approximate request rate above which a split design is cheaper than every colocated design.

    Only rates up to `rate` are compared. Return `rate` if a colocated design is cheapest at all of these rates, and
    None if a split design is cheapest at all of them.
    """
    pays, step = search.grid.step(rate), search.grid.step(_RUNG)
    if not await _splitting_pays(search, families, search.grid.rate(pays), weigh):
        return rate
    lowest = min(search.lowest(family.smallest) for family in families)
    while True:
        lower = pays - step
        if lower < lowest:  # even the smallest designs are nearly idle
            return None
        if not await _splitting_pays(search, families, search.grid.rate(lower), weigh):
            break
        pays = lower
    close = max(1, search.grid.step(_CLOSE))
    while pays - lower > close:
        middle = (pays + lower) // 2
        if await _splitting_pays(search, families, search.grid.rate(middle), weigh):
            pays = middle
        else:
            lower = middle
    return search.grid.rate(lower)


async def _splitting_pays(search: RateSearch, families: Sequence[Family], rate: float, weigh: CostFunction) -> bool:
    """Return whether a split design of any size meets the SLO at `rate` at a lower cost than every colocated design."""

    def weight(design: Design) -> tuple[float, ...]:
        return weigh(design)[:1]  # ties need not be broken

    colocated = await asyncio.gather(
        *(cheapest(search, [family], rate, Budget().allows, weight) for family in families if not family.split)
    )
    weights = [weigh(design)[0] for design in colocated if design is not None]
    found = await asyncio.gather(
        *(_lighter(search, family, rate, weigh, min(weights, default=None)) for family in families if family.split)
    )
    return any(found)


async def _lighter(search: RateSearch, family: Family, rate: float, weigh: CostFunction, limit: float | None) -> bool:
    if limit is None:  # no colocated design meets the SLO
        return await cheapest(search, [family], rate, Budget().allows, weigh) is not None
    lighter = frontier(family, lambda design: weigh(design)[0] < limit)
    return bool(lighter) and await find_passing(search, lighter, rate) is not None


class Objective(StrEnum):
    """Goal of a plan: most throughput within a budget, lowest cost, lowest power, or most goodput per accelerator."""

    THROUGHPUT = "throughput"
    COST = "cost"
    POWER = "power"
    GOODPUT = "goodput"

    @property
    def weigh(self) -> CostFunction:
        """Cost function of the objective: price, power or number of accelerators of a design."""
        if self is Objective.GOODPUT:
            return by_accelerators
        return by_power if self is Objective.POWER else by_price
