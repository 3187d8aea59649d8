"""The search for the highest rate that meets the SLO."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from support.analytic_cluster import AnalyticCluster, design
from twofold.planning.rates import RateGrid


@given(st.integers(-400, 800), st.sampled_from([0.005, 0.02, 0.1]))
def test_steps_and_rates_are_each_others_inverse(step, tolerance):
    grid = RateGrid(tolerance)
    assert grid.step(grid.rate(step)) == step
    assert grid.step(grid.rate(step) * (1 + tolerance / 2)) == step


@given(
    st.floats(0.05, 50), st.floats(0.05, 50), st.integers(1, 30), st.integers(1, 30), st.none() | st.integers(-200, 500)
)
def test_the_capacity_is_found_wherever_the_search_begins(per_prefill, per_decode, prefill, decode, start):
    cluster = AnalyticCluster(per_prefill, per_decode)
    search = cluster.search()
    one = design(prefill, decode)
    found = asyncio.run(search.highest(one, start))
    assert found.step == search.grid.step(cluster.capacity(one))
    assert found.kept.met
    assert found.rate == search.grid.rate(found.step)
    assert not asyncio.run(search.at(one, found.step + 1)).met
    assert len(cluster.asked) < 30


def test_search_ends_at_the_analytic_bound():
    cluster = AnalyticCluster(slack=0.5)
    search = cluster.search()
    found = asyncio.run(search.highest(design(4, 4)))
    assert found.step == search.grid.step(cluster.capacity(design(4, 4)) / 2)


def test_reports_designs_that_always_miss_the_slo():

    class Hopeless(AnalyticCluster):
        async def __call__(self, trial):
            return self.judged(trial.design, 1e9)

    found = asyncio.run(Hopeless().search().highest(design(1, 1)))
    assert (found.rate, found.step, found.kept) == (0.0, None, None)
