"""Overload control: rejected requests, retry times and priorities."""

import pytest

from support.ledgers import control, placed
from twofold.errors import ConfigurationError
from twofold.scheduling.admission.limits import RefusalReason
from twofold.scheduling.admission.overload import NEVER, OVERLOAD_RULES, create_overload_rule

PREFILL, DECODE = RefusalReason.PREFILL_LOAD, RefusalReason.DECODE_LOAD


def admit_decode(made, name, now, *, force=False):
    made.ledger.first_token(name, now)
    return made.admit_decode(name, now, force=force)


def filled(rule, *, prefills=0, decodes=0, **how):
    """Return the overload control of a cluster with `prefills` requests in prefill and `decodes` in decode."""
    # Ten requests in a phase reach the latency bound.
    made = control(rule, "p0", "d0", **how)
    for number in range(decodes):
        made.ledger.placed(placed(f"d{number}"), 0.0)
        assert admit_decode(made, f"d{number}", 0.0, force=True) is None
    for number in range(prefills):
        made.ledger.placed(placed(f"p{number}"), 0.0)
    return made


@pytest.mark.parametrize(
    ("rule", "reason"), [("none", None), ("baseline", PREFILL), ("early", PREFILL), ("predicted", PREFILL)]
)
def test_every_rule_but_none_rejects_late_prefills(rule, reason):
    """Every overload rule except `none` rejects requests that would miss the TTFT bound."""
    assert filled(rule, prefills=10, tbt_s=1.0).rejection(placed("x"), 0.0) is reason
    assert filled(rule, prefills=9, tbt_s=1.0).rejection(placed("x"), 0.0) is None


@pytest.mark.parametrize(
    ("rule", "reason"), [("none", None), ("baseline", None), ("early", DECODE), ("predicted", DECODE)]
)
def test_early_rules_check_decode_at_arrival(rule, reason):
    made = filled(rule, decodes=10)
    assert made.rejection(placed("x"), 0.0) is reason
    made.ledger.placed(placed("x"), 0.0)
    assert admit_decode(made, "x", 0.1) is (None if rule == "none" else DECODE)


def test_predicted_rule_counts_requests_in_prefill():
    """`predicted` counts requests in prefill as future decodes."""
    for rule, reason in (("early", None), ("predicted", DECODE)):
        assert filled(rule, prefills=9, decodes=5).rejection(placed("x"), 0.0) is reason


def test_forced_decode_skips_the_check():
    made = filled("early", decodes=10)
    made.ledger.placed(placed("x"), 0.0)
    assert admit_decode(made, "x", 0.1, force=True) is None
    assert made.ledger.loads(0.1)[1] == pytest.approx(1.1)


def test_retry_after_is_the_excess_of_the_queue():
    """Retry-After is the excess of the predicted TTFT over its bound, at least one second."""
    made = filled("early", prefills=32)
    assert made.refusal(placed("x"), PREFILL, 0.0).retry_after_s == 3  # 3.3 s with it, where 1 s is allowed
    assert filled("early", prefills=10).refusal(placed("x"), PREFILL, 0.0).retry_after_s == 1


def test_a_retry_after_the_wait_is_accepted():
    made = filled("predicted", prefills=32)
    wait_s = made.refusal(placed("x"), PREFILL, 0.0).retry_after_s
    now = 0.0
    while (now := round(now + 0.1, 1)) <= wait_s:
        name = f"p{round(now * 10) - 1}"
        admit_decode(made, name, now, force=True)
        made.ledger.finished(name, 1, now)
    assert made.rejection(placed("x", arrival_s=wait_s), wait_s) is None


def test_requests_that_miss_the_slo_alone_are_beyond_slo():
    made = control("early", "p0", "d0")
    assert made.rejection(placed("x", prompt=1001), 0.0) is RefusalReason.BEYOND_SLO
    assert made.refusal(placed("x", prompt=1001), RefusalReason.BEYOND_SLO, 0.0).retry_after_s == NEVER
    slow = control("early", "p0", "d0", tbt_s=0.005)
    assert slow.rejection(placed("x"), 0.0) is RefusalReason.BEYOND_SLO


@pytest.mark.parametrize(("priority", "most"), [(-3, 9), (0, 9), (1, 9), (2, 8), (5, 5), (99, 5)])
def test_less_urgent_requests_have_a_lower_limit(priority, most):
    made = filled("early", prefills=most, tbt_s=1.0)
    assert made.rejection(placed("x"), 0.0, priority) is None
    assert filled("early", prefills=most + 1, tbt_s=1.0).rejection(placed("x"), 0.0, priority) is PREFILL


def test_an_idle_cluster_accepts_the_least_urgent():
    assert control("predicted", "p0", "d0", tbt_s=0.011).rejection(placed("x", prompt=900), 0.0, 5) is None


def test_rejects_an_unknown_rule():
    assert set(OVERLOAD_RULES) == {"none", "baseline", "early", "predicted"}
    with pytest.raises(ConfigurationError, match="'late': choose one of none, baseline, early, predicted"):
        create_overload_rule("late")
