"""Plans: the best design of each kind, such as split or colocated."""

import asyncio

import pytest

from support.analytic_cluster import COLOCATED, SAME, SPLIT, AnalyticCluster, design
from twofold.errors import ConfigurationError
from twofold.planning.design import Budget
from twofold.planning.pareto import rate_curve
from twofold.planning.plan import PlanQuery, make_plan
from twofold.planning.search import Objective

FAMILIES = (SPLIT, SAME, COLOCATED)


def planned(cluster, *, objective="throughput", families=FAMILIES, rate=None, found=lambda _: None, **budget):
    query = PlanQuery(
        objective=Objective(objective),
        groups=tuple((family,) for family in families),
        budget=Budget(**budget),
        rate=rate,
    )
    return asyncio.run(make_plan(cluster.search(), query, found))


def test_the_choices_are_the_best_of_each_family_best_first():
    found = []
    plan = planned(AnalyticCluster(5.0, 3.0, 1.5), machines=16, found=found.append)
    assert [choice.design.counts for choice in plan.choices] == [(6, 10), (6, 10), (16,)]
    assert plan.best.design == design(6, 10)  # cheaper than the split of one machine type
    assert plan.best_split is plan.best
    assert plan.best_colocated.design == design(16, family=COLOCATED)
    assert {choice.design.family for choice in found} == set(FAMILIES)
    assert 0 < plan.break_even < plan.best.rate


def test_minimises_cost_at_a_given_rate():
    plan = planned(AnalyticCluster(5.0, 3.0, 1.5), objective="cost", rate=30.0)
    assert plan.best.design == design(6, 10)
    assert all(choice.rate == 30.0 <= choice.highest_rate for choice in plan.choices)
    weights = [choice.design.price_per_h for choice in plan.choices]
    assert weights == sorted(weights)


def test_power_ranks_by_watts():
    plan = planned(AnalyticCluster(5.0, 3.0, 2.5), objective="power", rate=30.0)
    watts = [choice.design.tdp_w for choice in plan.choices]
    assert watts == sorted(watts)


def test_families_that_cannot_keep_the_slo_are_named():

    class NoColocation(AnalyticCluster):
        def judged(self, one, rate):
            return super().judged(one, rate if one.family.split else 1e9)

    plan = planned(NoColocation(), machines=8)
    assert plan.without == ("fast mixed",)
    assert plan.best_colocated is None
    assert plan.break_even is None


def test_a_curve_comes_up_to_the_limit():
    """The last rate of a latency curve is the highest rate that meets the SLO."""
    cluster = AnalyticCluster()
    plan = planned(cluster, machines=8)
    rates = list(asyncio.run(rate_curve(cluster.search(), plan.best)))
    assert rates == sorted(rates)
    assert rates[-1] == plan.best.highest_rate


class Impossible(AnalyticCluster):
    def judged(self, one, rate):
        return super().judged(one, 3.0 * self.capacity(one))


@pytest.mark.parametrize(
    ("cluster", "query", "words"),
    [
        (Impossible(), {"machines": 8}, "TTFT slowdown P50 of 3×, above the bound of 1×"),
        (Impossible(), {"objective": "cost", "rate": 5.0}, "no design meets the SLO"),
        (AnalyticCluster(), {"machines": 1, "families": (SPLIT,)}, "one machine per phase, needs 2 machines"),
        (AnalyticCluster(), {"price_per_h": 10.0}, "too small: even 1×fast mixed needs 1 machine, "),
        (AnalyticCluster(), {"machines": 0}, "--max-machines must be more than 0"),
        (AnalyticCluster(), {}, "needs a budget"),
        (AnalyticCluster(), {"objective": "cost", "rate": 500.0, "machines": 9}, "9×fast mixed meets it up to 17.7"),
    ],
)
def test_explains_why_there_is_no_plan(cluster, query, words):
    with pytest.raises(ConfigurationError) as error:
        planned(cluster, **query)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
