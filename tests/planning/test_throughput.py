"""Tests of the search for the numbers of prefill and decode machines that maximize throughput."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from support.analytic_cluster import COLOCATED, SPLIT, AnalyticCluster, design
from twofold.planning.design import Budget, frontier
from twofold.planning.search import most_throughput

speeds = st.floats(0.1, 20)


def best_step(search, designs):
    return max(search.grid.step(search.evaluate.capacity(one)) for one in designs)


@given(speeds, speeds, st.integers(2, 60), st.floats(1.0, 4.0))
def test_best_split_equals_brute_force(per_prefill, per_decode, machines, slack):
    search = AnalyticCluster(per_prefill, per_decode, slack=slack).search()
    designs = frontier(SPLIT, Budget(machines=machines).allows)
    found = asyncio.run(most_throughput(search, designs))
    assert found.step == best_step(search, designs)


@given(speeds, speeds, st.floats(60, 1500), st.floats(20_000, 400_000), st.floats(1.0, 4.0))
def test_finds_the_best_split_within_price_and_power(per_prefill, per_decode, dollars, watts, slack):
    cluster = AnalyticCluster(per_prefill, per_decode, slack=slack)
    search = cluster.search()
    designs = frontier(SPLIT, Budget(price_per_h=dollars, tdp_w=watts).allows)
    if designs:
        assert asyncio.run(most_throughput(search, designs)).step == best_step(search, designs)


def test_needs_far_fewer_simulations_than_brute_force():

    class NoIdea(AnalyticCluster):
        def estimate(self, one):
            return 1.0

    cluster = NoIdea(slack=5.0)
    designs = frontier(SPLIT, Budget(machines=60).allows)
    search = cluster.search()
    assert asyncio.run(most_throughput(search, designs)).step == best_step(search, designs)
    assert len(set(cluster.asked)) < 60


@given(speeds, speeds, st.integers(2, 40))
def test_finds_the_best_split_without_a_limiting_phase(per_prefill, per_decode, machines):
    """The best design is also found if evaluations do not name the limiting phase."""
    cluster = AnalyticCluster(per_prefill, per_decode, tells=False)
    search = cluster.search()
    designs = frontier(SPLIT, Budget(machines=machines).allows)
    assert asyncio.run(most_throughput(search, designs)).step == best_step(search, designs)


def test_a_colocated_family_has_one_design():
    cluster = AnalyticCluster()
    search = cluster.search()
    found = asyncio.run(most_throughput(search, [design(10, family=COLOCATED)]))
    assert found.step == search.grid.step(20.0)


def test_a_hopeless_guess_does_not_end_the_search():

    # The design with the best estimate misses the SLO at any rate.
    class OnlyEven(AnalyticCluster):
        def capacity(self, one):
            return 1e-9 if one.counts == (2, 4) else super().capacity(one)

        def upper(self, one):
            return 20.0

        def estimate(self, one):
            return 10.0 if one.counts == (2, 4) else 1.0

    cluster = OnlyEven()
    designs = frontier(SPLIT, Budget(machines=6).allows)
    found = asyncio.run(most_throughput(cluster.search(), designs))
    assert found.design.counts == (3, 3)
