"""The most requests per second within a budget: which split of the machines takes most."""

from collections.abc import Sequence

from twofold.planning.design import Design
from twofold.planning.passing import find_passing
from twofold.planning.rates import Capacity, RateSearch


async def most_throughput(search: RateSearch, designs: Sequence[Design]) -> Capacity:
    """The design of a frontier with the highest capacity; one without any where none keeps the SLO.

    A further design must beat the best by a step of the grid, which costs it one simulation; only one that does
    is searched for its own capacity. `designs` is not empty.
    """
    guess = max(range(len(designs)), key=lambda place: (search.bound.estimate(designs[place]), -place))
    best = await search.highest(designs[guess])
    while True:
        to_beat = _lowest(search, designs) if best.step is None else best.step + 1
        better = await find_passing(search, designs, search.grid.rate(to_beat), designs.index(best.design))
        if better is None:
            return best
        best = await search.highest(better, to_beat)


def _lowest(search: RateSearch, designs: Sequence[Design]) -> int:
    """Where the guess keeps the SLO at no rate, another split may at a low one."""
    return min(search.lowest(design) for design in designs)
