"""Simulations of a design at a given request rate."""

import pytest

from twofold.errors import UserError
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.trials import SloUnreachable, simulate_trial
from twofold.request import Phase
from twofold.simulation.result import verdict
from twofold.simulation.simulate import simulate
from twofold.slo import Slo


def split(problem, *counts):
    return Design(family=Family(kinds=(problem.kind("h100"),) * 2), counts=counts)


@pytest.mark.parametrize("slo", ["splitwise", "ttft=1,tpot=0.06", "tpot=0.05"])
@pytest.mark.parametrize("rate", [3.0, 6.0, 9.0, 14.0, 30.0])
def test_an_early_end_never_changes_the_verdict(make_problem, slo, rate):
    problem = make_problem(slo, duration_s=40.0)
    trial = Trial(split(problem, 2, 2), rate)
    told = simulate_trial(problem, trial).evaluation
    whole = simulate(
        problem.spec(trial.design),
        problem.workload.requests(rate),
        catalog=problem.catalog,
        slo=problem.slo if isinstance(problem.slo, Slo) else None,
        reference=problem.reference_model(),
    )
    judged = verdict(whole, problem.slo, problem.attainment)
    assert told.met == judged.met
    if not told.stopped:
        assert told.checks[: len(judged.checks)] == judged.checks
        assert told.energy_j == whole.energy_j


def test_overload_ends_early(make_problem):
    problem = make_problem("ttft=1,tpot=0.06", duration_s=60.0)
    told = simulate_trial(problem, Trial(split(problem, 1, 1), 60.0)).evaluation
    assert told.stopped
    assert not told.met
    assert told.requests < 60 * 60


@pytest.mark.parametrize("slo", ["splitwise", "ttft=1.5,tpot=0.1"])
def test_bound_by_names_the_limiting_phase(make_problem, slo):
    problem = make_problem(slo, router="jsq-pending", duration_s=30.0)
    short_of_prefill = simulate_trial(problem, Trial(split(problem, 1, 8), 12.0)).evaluation
    short_of_decode = simulate_trial(problem, Trial(split(problem, 8, 1), 12.0)).evaluation
    assert (short_of_prefill.bound_by, short_of_decode.bound_by) == (Phase.PREFILL, Phase.DECODE)


def test_without_bounds_on_either_phase_the_busier_pool_tells(make_problem):
    """If the SLO bounds only E2E, the phase of the busier pool is reported as limiting."""
    problem = make_problem("e2e=20", router="jsq-pending", duration_s=30.0)
    assert simulate_trial(problem, Trial(split(problem, 8, 1), 12.0)).evaluation.bound_by is Phase.DECODE


def test_slo_in_seconds_checks_each_latency(make_problem):
    problem = make_problem("ttft=2,tpot=0.1,e2e=60")
    checks = simulate_trial(problem, Trial(split(problem, 2, 2), 4.0)).evaluation.checks
    assert [check.name for check in checks] == ["requests within the SLO", "TTFT P90", "TPOT P90", "E2E P90"]
    assert all(check.met for check in checks)


def test_a_cancelled_trial_ends(make_problem):
    """Cancellation during a simulation raises UserError."""
    problem = make_problem(duration_s=600.0)
    with pytest.raises(UserError, match="cancelled"):
        simulate_trial(problem, Trial(split(problem, 2, 2), 6.0), lambda: True)


def test_a_run_is_hopeless_once_too_many_have_missed():

    class Counts:
        rejected = failed = 0
        completed, slo_met = 5, 4

    class Request:
        output_tokens = 2

    # At 90% attainment of ten requests, the second miss makes the SLO unreachable.
    hopeless = SloUnreachable([Request()] * 10, Slo(ttft_s=1.0), 0.9)
    assert not hopeless(Counts())
    Counts.slo_met = 3
    assert hopeless(Counts())
