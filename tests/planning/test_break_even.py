"""The request rate above which a split design is cheaper than a colocated design."""

import asyncio

import pytest

from support.analytic_cluster import COLOCATED, SAME, AnalyticCluster, design
from twofold.planning.search import break_even, by_price

FAMILIES = [SAME, COLOCATED]


def found(cluster, rate, families=FAMILIES):
    return asyncio.run(break_even(cluster.search(), families, rate, by_price))


def machines(cluster, family, rate):
    """Return the smallest number of machines with which a split or colocated design serves a rate."""
    if not family.split:
        return next(n for n in range(1, 999) if cluster.capacity(design(n, family=family)) >= rate)
    return min(
        p + d for p in range(1, 60) for d in range(1, 60) if cluster.capacity(design(p, d, family=family)) >= rate
    )


@pytest.mark.parametrize("overhead", [1.0, 3.0, 8.0])
def test_break_even_is_where_machine_counts_meet(overhead):
    cluster = AnalyticCluster(6.0, 6.0, 2.0, overhead=overhead)
    rate = found(cluster, 100.0)
    assert machines(cluster, COLOCATED, rate) <= machines(cluster, SAME, rate)
    above = [rate * (1 + percent / 100) for percent in range(1, 13)]  # whole machines make the price a step function
    assert any(machines(cluster, SAME, more) < machines(cluster, COLOCATED, more) for more in above)


def test_break_even_is_the_rate_if_splitting_never_pays():
    assert found(AnalyticCluster(2.0, 2.0, 2.0), 50.0) == 50.0


def test_one_colocated_machine_wins_at_small_rates():
    cluster = AnalyticCluster(9.0, 9.0, 2.0)
    assert found(cluster, 50.0) == pytest.approx(4.0, rel=0.12)


def test_no_break_even_if_splitting_always_pays():

    class Poor(AnalyticCluster):
        def capacity(self, one):
            return 1e-6 if not one.family.split and one.machines < 3 else super().capacity(one)

        def upper(self, one):
            return 100.0 * one.machines

    assert found(Poor(9.0, 9.0, 2.0), 20.0) is None
