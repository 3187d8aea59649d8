"""SLO verdicts on simulation results."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.simulated import histogram, result
from twofold.errors import ConfigurationError
from twofold.simulation.histogram import Histogram
from twofold.simulation.result import verdict
from twofold.slo import SPLITWISE, Slo, SlowdownSlo

SLO = Slo(ttft_s=2.0)
GOOD = result(arrived=100, completed=100, rejected=0, failed=0)


def test_joint_attainment_counts_every_arrival():
    """All arrived requests count in the SLO attainment, even rejected and failed ones."""
    judged = verdict(result(slo_met=90), SLO)
    (check,) = judged.checks
    assert judged.met
    assert (check.value, check.bound, check.at_least) == (0.9, 0.9, True)
    assert not verdict(result(slo_met=89), SLO).met


@given(st.integers(1, 10**6), st.data())
def test_attainment_is_a_share_of_arrivals(arrived, data):
    met = data.draw(st.integers(0, arrived))
    judged = verdict(result(arrived=arrived, completed=arrived, slo_met=met), SLO, attainment=0.9)
    assert judged.met == (10 * met >= 9 * arrived)


def test_nine_bounds_of_splitwise():
    """Splitwise's SLO checks nine slowdown percentiles and the completion of all requests."""
    judged = verdict(GOOD, SPLITWISE)
    assert judged.met
    assert [check.name for check in judged.checks] == [
        *("TTFT slowdown P50", "TTFT slowdown P90", "TTFT slowdown P99"),
        *("TPOT slowdown P50", "TPOT slowdown P90", "TPOT slowdown P99"),
        *("E2E slowdown P50", "E2E slowdown P90", "E2E slowdown P99"),
        "requests completed",
    ]
    assert judged.checks[0].value == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("value", [1.25, 1.2500001])
def test_a_bound_may_be_reached_and_not_passed(value):
    """A percentile may equal its bound but not exceed it."""
    exact = Histogram(unit=value, counts={1: 1}, total=1, low=1, high=1)
    judged = verdict(result(arrived=1, completed=1, e2e_slowdown=exact), SlowdownSlo(e2e={50: 1.25}))
    assert judged.met == (value <= 1.25)


def test_slowdowns_need_every_request_completed():
    judged = verdict(result(arrived=100, completed=99), SPLITWISE)
    assert not judged.met
    assert [check.name for check in judged.checks if not check.met] == ["requests completed"]


def test_bounds_without_measurements_are_met():
    judged = verdict(result(arrived=1, completed=1, tpot_slowdown=histogram()), SlowdownSlo(tpot={50: 1.25}))
    assert judged.met
    assert judged.checks[0].value is None


def test_an_empty_run_misses_the_slo():
    assert not verdict(result(arrived=0, completed=0, slo_met=0), SLO).met
    assert not verdict(result(arrived=0, completed=0), SPLITWISE).met


@pytest.mark.parametrize(
    ("run", "slo", "attainment", "words"),
    [
        (result(slo_met=None), SLO, 0.9, "pass the SLO to the simulation"),
        (result(ttft_slowdown=None), SPLITWISE, 0.9, "pass a reference"),
        (GOOD, SLO, 0.0, "attainment must be more than 0"),
        (GOOD, SLO, 90.0, "attainment must be more than 0"),
        (GOOD, SLO, float("nan"), "attainment must be more than 0"),
    ],
)
def test_rejects_slos_that_were_not_measured(run, slo, attainment, words):
    with pytest.raises(ConfigurationError, match=words):
        verdict(run, slo, attainment)
