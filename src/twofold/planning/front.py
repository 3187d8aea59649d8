"""The Pareto front of a plan: its choices, smaller clusters of their kind, and whatever else was found on the way."""

import asyncio
from collections.abc import Iterable, Sequence

from twofold.planning.design import Design
from twofold.planning.pareto import Point, pareto_front
from twofold.planning.plan import Choice
from twofold.planning.rates import RateSearch

_SHARES = (0.25, 0.5, 0.75)  # of a choice's machines


async def front_of(
    search: RateSearch, choices: Sequence[Choice], found: Iterable[Point]
) -> tuple[Point, ...]:
    """The front, each of its designs at the highest rate that it takes.

    `found` are points that a search came by, mostly below what their designs can take.
    """
    best = pareto_front(Point(design=choice.design, rate=choice.highest_rate) for choice in choices)
    smaller = {design: None for point in best for design in _smaller(point.design)}
    points = {*best, *found, *await _at_capacity(search, smaller)}
    # What is on the front of all may take more, and what it then takes may cover others.
    raised = await _at_capacity(search, {point.design: None for point in pareto_front(points)})
    return pareto_front({*points, *raised})


def _smaller(design: Design) -> list[Design]:
    counts = [tuple(max(1, round(count * share)) for count in design.counts) for share in _SHARES]
    return [Design(family=design.family, counts=each) for each in counts if each != design.counts]


async def _at_capacity(search: RateSearch, designs: Iterable[Design]) -> list[Point]:
    capacities = await asyncio.gather(*(search.highest(design) for design in designs))
    return [
        Point(design=capacity.design, rate=search.grid.rate(capacity.step))
        for capacity in capacities
        if capacity.step is not None
    ]
