"""Analytic upper bounds on the rate of a design."""

import pytest

from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.trials import simulate_trial


def designs(problem):
    fast, slow = problem.kind("h100"), problem.kind("a100")
    yield Design(family=Family(kinds=(fast, fast)), counts=(2, 3))
    yield Design(family=Family(kinds=(fast, slow)), counts=(1, 4))
    yield Design(family=Family(kinds=(fast,), batcher="mixed"), counts=(4,))
    yield Design(family=Family(kinds=(slow,), batcher="chunked-prefill", max_num_batched_tokens=512), counts=(4,))


@pytest.mark.parametrize("slo", ["splitwise", "ttft=1.5,tpot=0.08"])
@pytest.mark.parametrize("router", ["splitwise", "jsq-pending"])
def test_simulation_never_beats_the_bound(make_problem, slo, router):
    problem = make_problem(slo, router, duration_s=60.0)
    bounds = AnalyticBounds(problem)
    for one in designs(problem):
        assert not simulate_trial(problem, Trial(one, 1.05 * bounds.upper(one))).evaluation.met


def test_bound_is_monotone_and_suggestions_suffice(make_problem):
    problem = make_problem()
    bounds = AnalyticBounds(problem)
    for one in designs(problem):
        more = Design(family=one.family, counts=tuple(count + 1 for count in one.counts))
        assert bounds.upper(more) > bounds.upper(one) >= bounds.estimate(one) > 0
        counts = bounds.suggest(one.family, 12.0)
        assert min(counts) >= 1
        assert bounds.upper(Design(family=one.family, counts=counts)) >= 12.0


def test_fixed_pools_are_bounded_by_their_own_phase(make_problem):
    """If roles are fixed, one prefill machine limits the rate even beside 100 decode machines."""
    fixed, pooled = make_problem(router="jsq-pending"), make_problem(router="splitwise")
    kind = fixed.kind("h100")
    lopsided = Design(family=Family(kinds=(kind, kind)), counts=(1, 100))
    assert AnalyticBounds(fixed).upper(lopsided) < AnalyticBounds(pooled).upper(lopsided) / 10
