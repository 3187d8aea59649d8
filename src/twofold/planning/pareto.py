"""Pareto front of cluster designs in request rate, price and power. `rate_curve` evaluates one at several rates."""

import asyncio
from collections.abc import Iterable, Sequence

from twofold.planning.design import Design, RatedDesign
from twofold.planning.evaluation import Evaluation
from twofold.planning.plan import DesignChoice
from twofold.planning.rates import RateSearch


def pareto_front(points: Iterable[RatedDesign]) -> tuple[RatedDesign, ...]:
    """Return the Pareto-optimal points in ascending order of rate."""
    front: list[RatedDesign] = []
    # In this order, only earlier points can cover a point.
    for point in sorted(points, key=_order):
        if not any(covers(other, point) for other in front):
            front.append(point)
    return tuple(reversed(front))


def covers(one: RatedDesign, other: RatedDesign) -> bool:
    """Return whether `one` is at least as good as `other` in rate, price and power."""
    mine, others = one.design, other.design
    return one.rate >= other.rate and mine.price_per_h <= others.price_per_h and mine.tdp_w <= others.tdp_w


def _order(point: RatedDesign) -> tuple[float, float, float, int, str]:
    design = point.design
    # Of equal points, the one with the fewest machines comes first.
    return -point.rate, design.price_per_h, design.tdp_w, design.machines, design.name


_SHARES = (0.25, 0.5, 0.75)  # of a choice's machines


async def front_of(
    search: RateSearch, choices: Sequence[DesignChoice], found: Iterable[RatedDesign]
) -> tuple[RatedDesign, ...]:
    """Return the Pareto-optimal designs in price, power and highest request rate, in ascending order of rate."""
    # Candidates: the choices, smaller versions of them, and the points found during the search.
    best = pareto_front(RatedDesign(design=choice.design, rate=choice.highest_rate) for choice in choices)
    smaller = {design: None for point in best for design in _smaller(point.design)}
    points = {*best, *found, *await _at_capacity(search, smaller)}
    # Points found during the search may have higher rates, at which they may cover others.
    raised = await _at_capacity(search, {point.design: None for point in pareto_front(points)})
    return pareto_front({*points, *raised})


def _smaller(design: Design) -> list[Design]:
    counts = [tuple(max(1, round(count * share)) for count in design.counts) for share in _SHARES]
    return [Design(family=design.family, counts=each) for each in counts if each != design.counts]


async def _at_capacity(search: RateSearch, designs: Iterable[Design]) -> list[RatedDesign]:
    return [RatedDesign(design=each.design, rate=each.rate) for each in await search.highest_of(designs)]


_CURVES_SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 1.0)

RateCurve = dict[float, Evaluation]


async def rate_curve(search: RateSearch, choice: DesignChoice) -> RateCurve:
    """Evaluate a design at rates up to the highest that meets the SLO. Return evaluations by rate in requests/s."""
    steps = sorted({search.grid.step(choice.highest_rate * share) for share in _CURVES_SHARES})
    rates = [search.grid.rate(step) for step in steps]
    told = await asyncio.gather(*(search.at_rate(choice.design, rate) for rate in rates))
    # Evaluations that stopped early are left out.
    return {rate: each for rate, each in zip(rates, told, strict=True) if not each.stopped}
