"""The cheapest design for a rate, compared with brute force."""

import asyncio
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.analytic_cluster import COLOCATED, SAME, SPLIT, AnalyticCluster, design
from twofold.planning.design import Budget
from twofold.planning.search import by_power, by_price, cheapest

speeds = st.floats(0.5, 20)
NO_LIMIT = Budget()


def brute_force(cluster, family, rate, budget, weigh, most=24):
    counts = product(range(1, most), repeat=len(family.kinds))
    designs = (design(*each, family=family) for each in counts)
    able = [one for one in designs if budget.allows(one) and cluster.capacity(one) >= rate]
    return min(map(weigh, able), default=None)


@given(speeds, speeds, st.floats(0.5, 10), st.floats(1.0, 4.0), st.sampled_from([by_price, by_power]), st.booleans())
def test_cheapest_split_equals_brute_force(per_prefill, per_decode, rate, slack, weigh, same):
    cluster = AnalyticCluster(per_prefill, per_decode, slack=slack)
    family = SAME if same else SPLIT
    best = brute_force(cluster, family, rate, NO_LIMIT, weigh)
    found = asyncio.run(cheapest(cluster.search(), [family], rate, NO_LIMIT.allows, weigh))
    assert weigh(found) == best


@given(speeds, speeds, st.floats(0.5, 25), st.integers(2, 20), st.floats(50, 800))
def test_respects_the_budget(per_prefill, per_decode, rate, machines, dollars):
    cluster = AnalyticCluster(per_prefill, per_decode)
    budget = Budget(machines=machines, price_per_h=dollars)
    best = brute_force(cluster, SPLIT, rate, budget, by_price, most=20)
    found = asyncio.run(cheapest(cluster.search(), [SPLIT], rate, budget.allows, by_price))
    assert (None if found is None else by_price(found)) == best


@given(speeds, st.floats(0.5, 100))
def test_a_colocated_family_takes_the_fewest_machines(per_mixed, rate):
    cluster = AnalyticCluster(per_mixed=per_mixed)
    found = asyncio.run(cheapest(cluster.search(), [COLOCATED], rate, NO_LIMIT.allows, by_price))
    assert cluster.capacity(found) >= rate
    assert found.machines == 1 or cluster.capacity(design(found.machines - 1, family=COLOCATED)) < rate


def test_ends_if_more_machines_do_not_help():

    class Capped(AnalyticCluster):
        def capacity(self, one):
            return min(super().capacity(one), 10.0)

        def upper(self, one):
            return 1e9

    assert asyncio.run(cheapest(Capped().search(), [SPLIT], 11.0, NO_LIMIT.allows, by_price)) is None


@pytest.mark.parametrize("family", [SPLIT, COLOCATED])
def test_ends_if_only_one_kind_is_limited(family):
    cluster = AnalyticCluster()
    budget = Budget(of_kind={"dgx-fast": 1})
    assert asyncio.run(cheapest(cluster.search(), [family], 100.0, budget.allows, by_price)) is None
