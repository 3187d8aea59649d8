"""Rates and sizes at which enough draws of the workload meet the SLO."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.analytic_cluster import COLOCATED, SPLIT, AnalyticCluster, design
from twofold.errors import ConfigurationError
from twofold.planning.design import Budget
from twofold.planning.plan import PlanQuery, make_plan
from twofold.planning.promise import Draws, Promise, promised_step
from twofold.planning.search import Objective
from twofold.planning.workload import WHOLE


class Uneven(AnalyticCluster):
    """A cluster in which some draws have a load above the mean."""

    def __init__(self, loads, **more):
        super().__init__(**more)
        self.loads = loads  # by draw

    async def __call__(self, trial):
        self.asked.append(trial)
        return self.judged(trial.design, trial.rate * self.loads.get(trial.draw, 1.0))


def planned(cluster, objective="throughput", rate=None, confidence=0.6, number=4, whole=False, **budget):
    query = PlanQuery(
        objective=Objective(objective),
        groups=((SPLIT,), (COLOCATED,)),
        budget=Budget(**budget),
        rate=rate,
        draws=Draws(confidence=confidence, numbers=tuple(range(1, number + 1)), whole=whole),
    )
    return asyncio.run(make_plan(cluster.search(), query))


@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=12), st.floats(0.0, 1.0), st.booleans())
def test_the_promised_rate_equals_brute_force(loads, share, whole):
    cluster = Uneven(dict(enumerate(loads, start=1)))
    search, one = cluster.search(), design(4, family=COLOCATED)
    confidence = share * len(loads) / (len(loads) + 1)
    draws = Draws(confidence=confidence, numbers=tuple(range(1, len(loads) + 1)), whole=whole)
    start = search.grid.step(cluster.capacity(one))
    step, missed = asyncio.run(promised_step(search, one, start, draws))

    def misses(at):
        return [draw for draw in draws.numbers if search.grid.rate(at) * cluster.loads[draw] > cluster.capacity(one)]

    assert sorted(misses(step)) == sorted(missed)
    assert draws.enough(misses(step))
    top = step == start if whole else search.grid.rate(step + 1) > cluster.upper(one)
    assert top or not draws.enough(misses(step + 1))


@pytest.mark.parametrize(("confidence", "least"), [(0.95, 19), (0.9, 9), (0.5, 1)])
def test_a_confidence_needs_a_number_of_draws(confidence, least):
    """With as many draws as stated, all of them must meet the SLO; fewer raise ConfigurationError."""
    assert Draws(confidence=confidence, numbers=tuple(range(least)), whole=False).spare == 0
    with pytest.raises(ConfigurationError, match=f"needs at least {least} draws"):
        Draws(confidence=confidence, numbers=tuple(range(least - 1)), whole=False)


def test_other_draws_meet_the_slo_as_often_as_required():
    """For draws of random load, the promised rate suffices for another such draw with the required confidence."""
    loads = [random.Random(seed).lognormvariate(0.0, 0.2) for seed in range(20 * 400)]
    kept = 0
    for first in range(0, len(loads), 20):
        mine, another = loads[first : first + 19], loads[first + 19]
        cluster, one = Uneven(dict(enumerate(mine, start=1))), design(4, family=COLOCATED)
        search, draws = cluster.search(), Draws(confidence=0.9, numbers=tuple(range(1, 20)), whole=False)
        step, _ = asyncio.run(promised_step(search, one, search.grid.step(cluster.capacity(one)), draws))
        kept += search.grid.rate(step) * another <= cluster.capacity(one)
    assert 0.9 <= kept / 400 < 0.95


def test_the_rate_of_a_plan_is_one_that_enough_draws_keep():
    plan = planned(Uneven({1: 0.8, 2: 1.25, 3: 1.0, 4: 2.0}), machines=16)
    assert [choice.promise.kept for choice in plan.choices] == [3, 3]
    for choice in plan.choices:
        assert choice.promise.holds
        assert choice.promise.margin == pytest.approx(1.25, rel=0.03)
        assert choice.promise.optimistic == choice.design.name
    assert plan.best.highest_rate == plan.best.rate


def test_the_whole_trace_must_keep_the_slo():
    cluster = Uneven({WHOLE: 1.5})
    plan = planned(cluster, machines=16, whole=True)
    assert plan.best.promise.whole
    assert plan.best.promise.margin == 1.0
    assert 1.45 < cluster.capacity(plan.best.design) / plan.best.rate < 1.55


def test_a_plan_for_a_rate_has_enough_machines_for_the_draws():
    cluster = Uneven({1: 1.3, 2: 1.3})
    plan = planned(cluster, objective="cost", rate=30.0, confidence=0.8)
    for choice in plan.choices:
        assert cluster.capacity(choice.design) >= 30.0 * 1.3
        assert (choice.rate, choice.promise.kept) == (30.0, 4)
        assert 1.2 < choice.promise.margin < 1.5
    assert cluster.capacity(plan.best_colocated.design) < 30.0 * 1.3 * 1.1


def test_a_plan_for_a_rate_has_no_more_machines_than_the_draws_need():
    cluster = Uneven({0: 1.2})
    plan = planned(cluster, objective="cost", rate=30.0, confidence=0.8)
    assert plan.best_colocated.promise.kept == 4
    assert 30.0 <= cluster.capacity(plan.best_colocated.design) < 30.0 * 1.2 * 0.95


def test_a_budget_that_does_not_suffice_is_not_hidden():
    plan = planned(Uneven({1: 1.3, 2: 1.3}), objective="cost", rate=30.0, confidence=0.8, machines=16)
    assert plan.best.promise.kept == 2
    assert not plan.best.promise.holds


@pytest.mark.parametrize(
    ("kept", "draws", "low", "high"), [(20, 20, 0.839, 1.0), (19, 20, 0.764, 0.991), (0, 10, 0.0, 0.278)]
)
def test_the_interval_is_that_of_wilson(kept, draws, low, high):
    promise = Promise(confidence=0.95, draws=draws, kept=kept, optimistic="", margin=1.0)
    assert promise.interval == pytest.approx((low, high), abs=0.001)
