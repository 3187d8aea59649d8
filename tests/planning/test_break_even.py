"""The break-even rate is where splitting stops being cheaper."""

import asyncio

import pytest

from support.analytic_cluster import COLOCATED, SAME, AnalyticCluster, design
from twofold.planning.search import break_even, by_price

FAMILIES = [SAME, COLOCATED]


def found(cluster, rate, families=FAMILIES):
    return asyncio.run(break_even(cluster.search(), families, rate, by_price))


def machines(cluster, family, rate):
    """The fewest machines of a family for a rate, by trying them all."""
    if not family.split:
        return next(n for n in range(1, 999) if cluster.capacity(design(n, family=family)) >= rate)
    return min(
        p + d
        for p in range(1, 60)
        for d in range(1, 60)
        if cluster.capacity(design(p, d, family=family)) >= rate
    )


@pytest.mark.parametrize("overhead", [1.0, 3.0, 8.0])
def test_it_lies_where_the_numbers_of_machines_meet(overhead):
    """A split cluster takes more per machine, less a fixed loss: it pays from some rate on."""
    cluster = AnalyticCluster(6.0, 6.0, 2.0, overhead=overhead)
    rate = found(cluster, 100.0)
    assert machines(cluster, COLOCATED, rate) <= machines(cluster, SAME, rate)
    above = [rate * (1 + percent / 100) for percent in range(1, 13)]  # whole machines make it a staircase
    assert any(machines(cluster, SAME, more) < machines(cluster, COLOCATED, more) for more in above)


def test_it_is_the_rate_itself_where_splitting_never_pays():
    """Two machines for what one does."""
    assert found(AnalyticCluster(2.0, 2.0, 2.0), 50.0) == 50.0


def test_one_colocated_machine_wins_at_small_rates():
    """Because a split takes two."""
    cluster = AnalyticCluster(9.0, 9.0, 2.0)
    assert found(cluster, 50.0) == pytest.approx(4.0, rel=0.12)


def test_there_is_none_where_colocated_designs_are_dearer_throughout():
    """A colocated family that needs three machines even when it is all but idle."""

    class Poor(AnalyticCluster):
        def capacity(self, one):
            return 1e-6 if not one.family.split and one.machines < 3 else super().capacity(one)

        def upper(self, one):
            return 100.0 * one.machines

    assert found(Poor(9.0, 9.0, 2.0), 20.0) is None
