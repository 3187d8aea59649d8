"""Goodput of a cluster design for several workload seeds, and the confidence interval of the median goodput."""

import asyncio

import pytest

from support.analytic_placement import AnalyticPlacement, kind
from twofold.planning.design import Design, Family
from twofold.planning.placement.plan import Confidence, confidence


def test_the_range_of_six_draws_holds_the_median_with_97_percent():
    found = Confidence(rates=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5))
    # All six draws are on the same side of the median with probability 2/64.
    assert found.level == pytest.approx(1 - 2 / 64)
    assert found.median == pytest.approx(1.25)


def test_searches_every_draw():

    class Drawn(AnalyticPlacement):
        async def __call__(self, trial):
            self.decode = lambda _: 5.0 - trial.draw
            return await super().__call__(trial)

    search = Drawn(lambda _: 10.0, lambda _: 5.0).search()
    one = Design(family=Family(kinds=(kind(1), kind(1))), counts=(1, 1))
    found = asyncio.run(confidence(search, one, 4.0, range(3)))
    assert found.rates == pytest.approx((3.0, 4.0, 5.0), rel=0.02)
