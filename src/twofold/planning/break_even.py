"""Below which rate splitting does not pay: where a colocated design first costs no more than any split one."""

import asyncio
from collections.abc import Sequence

from twofold.planning.budget import frontier
from twofold.planning.cheapest import Weigh, cheapest
from twofold.planning.design import Design, Family
from twofold.planning.passing import find_passing
from twofold.planning.rates import RateSearch

_RUNG = 2.0  # from one rate down to the next that is looked at
_CLOSE = 1.1  # how near the answer comes


async def break_even(
    search: RateSearch,
    families: Sequence[Family],
    rate: float,
    weigh: Weigh,
) -> float | None:
    """The rate, about, at or below which the lightest colocated design is no heavier than any split one.

    Looks downward from `rate`. Returns `rate` itself where splitting does not pay even there, and None where it
    pays as far down as one machine of each phase is more than idle.
    """
    pays, step = search.grid.step(rate), search.grid.step(_RUNG)
    if not await _splitting_pays(search, families, search.grid.rate(pays), weigh):
        return rate
    lowest = min(_idle(search, family) for family in families)
    while True:
        lower = pays - step
        if lower < lowest:
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


async def _splitting_pays(search: RateSearch, families: Sequence[Family], rate: float, weigh: Weigh) -> bool:
    """Whether some split design that keeps the SLO at `rate` is lighter than every colocated one that does."""
    colocated = await asyncio.gather(
        *(
            cheapest(search, family, rate, _anything, _first_only(weigh))
            for family in families
            if not family.split
        )
    )
    weights = [weigh(design)[0] for design in colocated if design is not None]
    found = await asyncio.gather(
        *(
            _lighter(search, family, rate, weigh, min(weights, default=None))
            for family in families
            if family.split
        )
    )
    return any(found)


async def _lighter(
    search: RateSearch, family: Family, rate: float, weigh: Weigh, limit: float | None
) -> bool:
    if limit is None:  # no colocated design does it: any split one that does is lighter
        return await cheapest(search, family, rate, _anything, weigh) is not None
    lighter = frontier(family, lambda design: weigh(design)[0] < limit)
    return bool(lighter) and await find_passing(search, lighter, rate) is not None


def _anything(_: Design) -> bool:
    """A budget would cut off large clusters; this is about small ones."""
    return True


def _first_only(weigh: Weigh) -> Weigh:
    return lambda design: weigh(design)[:1]


def _idle(search: RateSearch, family: Family) -> int:
    return search.lowest(Design(family=family, counts=(1,) * len(family.kinds)))
