"""Latency over rate: how a design comes up to its limit."""

import asyncio

from twofold.planning.evaluation import Evaluation, Trial
from twofold.planning.plan import Choice
from twofold.planning.rates import RateSearch

_SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 1.0)

Curve = dict[float, Evaluation]


async def curve(search: RateSearch, choice: Choice) -> Curve:
    """Evaluations of a design at rates up to the highest that it takes."""
    steps = sorted({search.grid.step(choice.highest_rate * share) for share in _SHARES})
    rates = [search.grid.rate(step) for step in steps]
    told = await asyncio.gather(*(search.evaluate(Trial(choice.design, rate)) for rate in rates))
    return {rate: each for rate, each in zip(rates, told, strict=True) if not each.stopped}
