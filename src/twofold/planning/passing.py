"""Which of several designs keeps the SLO at a rate, if any: a bisection over the split."""

import asyncio
from collections.abc import Sequence

from twofold.planning.design import Design
from twofold.planning.evaluation import Evaluation, Trial
from twofold.planning.rates import RateSearch
from twofold.request import Phase

# How far from where the bisection began and ended its neighbours are asked as well: what is in the way of the SLO
# says only nearly always where to look, since pools may help each other out.
_NEIGHBOURS = (1, 2, 4)


async def find_passing(
    search: RateSearch, designs: Sequence[Design], rate: float, start: int | None = None
) -> Design | None:
    """A design that keeps the SLO at `rate`; None where none does.

    `designs` are a frontier, by rising count of prefill machines: what fails for want of prefill has everything
    that may pass after it, what fails for want of decode before it. Designs whose bound is below `rate` are not
    simulated. `start` is where to begin, by default where the bound is most generous.
    """
    open_places = [place for place, design in enumerate(designs) if search.could(design, rate)]
    if not open_places:
        return None
    tried: dict[int, Evaluation] = {}
    place = _nearest(
        open_places, start if start is not None else _best_estimate(search, designs, open_places)
    )
    first = last = place
    low, high = open_places[0], open_places[-1]
    while low <= high:
        tried[place] = told = await search.evaluate(Trial(designs[place], rate))
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


async def _among(
    search: RateSearch, designs: Sequence[Design], rate: float, places: Sequence[int]
) -> Design | None:
    told = await asyncio.gather(*(search.evaluate(Trial(designs[place], rate)) for place in places))
    passed = (designs[place] for place, each in zip(places, told, strict=True) if each.met)
    return next(passed, None)


def _best_estimate(search: RateSearch, designs: Sequence[Design], places: Sequence[int]) -> int:
    return max(places, key=lambda place: (search.bound.estimate(designs[place]), -place))


def _nearest(places: Sequence[int], wanted: int) -> int:
    return min(places, key=lambda place: abs(place - wanted))
