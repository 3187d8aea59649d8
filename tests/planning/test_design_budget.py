"""Budgets of machines, price and power, and the largest designs within a budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.analytic_cluster import COLOCATED, FAST, SAME, SPLIT, design
from twofold.errors import ConfigurationError
from twofold.planning.design import Budget, frontier

budgets = st.builds(
    Budget,
    machines=st.none() | st.integers(1, 12),
    price_per_h=st.none() | st.floats(20, 400),
    tdp_w=st.floats(5_000, 100_000),
    of_kind=st.dictionaries(st.sampled_from(["dgx-fast", "dgx-slow"]), st.integers(1, 6)),
)


@given(budgets)
def test_frontier_has_the_largest_allowed_designs(budget):
    allowed = {
        (prefill, decode)
        for prefill in range(1, 20)
        for decode in range(1, 20)
        if budget.allows(design(prefill, decode))
    }
    largest = {
        (prefill, decode)
        for prefill, decode in allowed
        if (prefill + 1, decode) not in allowed and (prefill, decode + 1) not in allowed
    }
    found = [one.counts for one in frontier(SPLIT, budget.allows)]
    assert found == sorted(largest)


@given(budgets)
def test_a_colocated_frontier_is_the_largest(budget):
    found = [one.counts for one in frontier(COLOCATED, budget.allows)]
    most = max((n for n in range(20) if n == 0 or budget.allows(design(n, family=COLOCATED))), default=0)
    assert found == ([(most,)] if most else [])


def test_machine_limits_count_both_phases():
    budget = Budget(of_kind={FAST.name: 5})
    assert budget.bounds(SAME)
    assert not budget.bounds(SPLIT)
    assert budget.allows(design(2, 3, family=SAME))
    assert not budget.allows(design(3, 3, family=SAME))


def test_price_bounds_tolerate_rounding():
    assert Budget(price_per_h=3 * 38 + 10 * 17.6).allows(design(3, 10))


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(machines=0), "--max-machines must be more than 0"),
        (Budget(price_per_h=-1.0), "--max-cost must be more than 0"),
        (Budget(tdp_w=0.0), "--max-power must be more than 0"),
        (Budget(of_kind={"dgx-fast": 0}), "dgx-fast=0"),
    ],
)
def test_rejects_bounds_that_admit_nothing(budget, words):
    with pytest.raises(ConfigurationError, match=words):
        budget.require_sensible()
