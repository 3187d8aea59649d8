"""The least dollars or watts for a given rate."""

import math
from collections.abc import Callable

from twofold.planning.budget import Allows, frontier
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.passing import find_passing
from twofold.planning.rates import RateSearch

# What is to be least, with what decides between equals behind it; it grows with every machine.
Weigh = Callable[[Design], tuple[float, ...]]

# A design this many times what the bound suggests, and still not enough, says that machines are not what is missing.
_GROWTH = (1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 8.0)


def by_price(design: Design) -> tuple[float, ...]:
    return design.price_per_h, design.tdp_w, design.machines


def by_power(design: Design) -> tuple[float, ...]:
    return design.tdp_w, design.price_per_h, design.machines


def by_accelerators(design: Design) -> tuple[float, ...]:
    return design.accelerators, design.price_per_h, design.machines


async def cheapest(
    search: RateSearch, family: Family, rate: float, allows: Allows, weigh: Weigh
) -> Design | None:
    """The lightest design of a family that keeps the SLO at `rate`; None where none that is allowed does.

    First any design that does, larger and larger; then, again and again, one on the frontier of all lighter ones,
    shrunk to where it cannot lose a machine. The last, which no lighter one replaces, is the lightest.
    """
    best = await _first(search, family, rate, allows)
    while best is not None:
        best = await _shrunk(search, best, rate)
        limit = weigh(best)
        lighter = frontier(family, lambda design, limit=limit: allows(design) and weigh(design) < limit)  # type: ignore[misc]
        found = await find_passing(search, lighter, rate, _nearest(lighter, best)) if lighter else None
        if found is None:
            return best
        best = found
    return None


async def _first(search: RateSearch, family: Family, rate: float, allows: Allows) -> Design | None:
    """Any allowed design that keeps the SLO at `rate`: near what the bound suggests, else the largest allowed."""
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
    """The design less every machine that it can lose, those of the last kind first."""
    for place in reversed(range(len(design.counts))):
        low, high = 0, design.counts[place]  # too few, enough
        while high - low > 1:
            middle = (low + high) // 2
            passes = await _passes(search, _with(design, place, middle), rate)
            low, high = (low, middle) if passes else (middle, high)
        design = _with(design, place, high)
    return design


async def _passes(search: RateSearch, design: Design, rate: float) -> bool:
    return search.could(design, rate) and (await search.evaluate(Trial(design, rate))).met


def _grown(family: Family, counts: tuple[int, ...], by: float) -> Design:
    return Design(family=family, counts=tuple(math.ceil(count * by) for count in counts))


def _with(design: Design, place: int, count: int) -> Design:
    counts = tuple(count if at == place else other for at, other in enumerate(design.counts))
    return Design(family=design.family, counts=counts)


def _within(design: Design, most: Design) -> bool:
    return all(mine <= top for mine, top in zip(design.counts, most.counts, strict=True))


def _nearest(designs: list[Design], design: Design) -> int:
    return min(range(len(designs)), key=lambda place: abs(designs[place].counts[0] - design.counts[0]))
