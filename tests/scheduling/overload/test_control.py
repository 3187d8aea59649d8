"""Who is refused by which rule, for how long, and who is let in before others."""

import pytest

from support.ledgers import control, newcomer
from twofold.errors import ConfigurationError
from twofold.scheduling.admission.limits import RefusalReason
from twofold.scheduling.admission.overload import NEVER
from twofold.scheduling.overload import OVERLOADS, create_overload

PREFILL, DECODE = RefusalReason.PREFILL_LOAD, RefusalReason.DECODE_LOAD


def filled(rule, *, prefills=0, decodes=0, **how):
    """That many on their way through prefill, and that many who decode; ten decodes are the bound."""
    made = control(rule, "p0", "d0", **how)
    for number in range(decodes):
        made.placed(newcomer(f"d{number}"), 0.0)
        assert made.prefilled(f"d{number}", 0.0, sure=True) is None
    for number in range(prefills):
        made.placed(newcomer(f"p{number}"), 0.0)
    return made


@pytest.mark.parametrize(
    ("rule", "reason"), [("none", None), ("baseline", PREFILL), ("early", PREFILL), ("predicted", PREFILL)]
)
def test_a_prefill_that_would_be_late_is_refused_at_arrival(rule, reason):
    """By all rules but none; ten prompts before it take the second that the SLO gives, nine leave room."""
    assert filled(rule, prefills=10, tbt_s=1.0).arrival(newcomer("x"), 0.0) is reason
    assert filled(rule, prefills=9, tbt_s=1.0).arrival(newcomer("x"), 0.0) is None


@pytest.mark.parametrize(
    ("rule", "reason"), [("none", None), ("baseline", None), ("early", DECODE), ("predicted", DECODE)]
)
def test_a_full_decode_is_seen_at_arrival_by_early_rejection(rule, reason):
    """The baseline looks at it when the prompt is computed."""
    made = filled(rule, decodes=10)
    assert made.arrival(newcomer("x"), 0.0) is reason
    made.placed(newcomer("x"), 0.0)
    assert made.prefilled("x", 0.1) is (None if rule == "none" else DECODE)


def test_only_prediction_sees_those_who_will_come_to_decode():
    """Nine prompts before it and five decodes: fifteen by the time that it is prefilled itself."""
    for rule, reason in (("early", None), ("predicted", DECODE)):
        assert filled(rule, prefills=9, decodes=5).arrival(newcomer("x"), 0.0) is reason


def test_what_is_sure_is_not_asked_again():
    """A request whose client has a token already goes on."""
    made = filled("early", decodes=10)
    made.placed(newcomer("x"), 0.0)
    assert made.prefilled("x", 0.1, sure=True) is None
    assert made.ledger.loads(0.1)[1] == pytest.approx(1.1)


def test_the_wait_is_what_the_queue_is_too_long():
    """In whole seconds, and at least one."""
    made = filled("early", prefills=32)
    assert made.refusal(newcomer("x"), PREFILL, 0.0).retry_after_s == 3  # 3.3 s with it, where 1 s is allowed
    assert filled("early", prefills=10).refusal(newcomer("x"), PREFILL, 0.0).retry_after_s == 1


def test_who_comes_back_when_told_is_taken():
    """The promise holds if nobody else came, and what is there goes on as predicted."""
    made = filled("predicted", prefills=32)
    wait_s = made.refusal(newcomer("x"), PREFILL, 0.0).retry_after_s
    now = 0.0
    while (now := round(now + 0.1, 1)) <= wait_s:
        name = f"p{round(now * 10) - 1}"
        made.prefilled(name, now, sure=True)
        made.ended(name, now, output_tokens=1)
    assert made.arrival(newcomer("x", arrival_s=wait_s), wait_s) is None


def test_what_is_too_long_for_the_slo_is_too_long_for_ever():
    """To wait would not help: nobody is there."""
    made = control("early", "p0", "d0")
    assert made.arrival(newcomer("x", prompt=1001), 0.0) is RefusalReason.BEYOND_SLO
    assert made.refusal(newcomer("x", prompt=1001), RefusalReason.BEYOND_SLO, 0.0).retry_after_s == NEVER
    slow = control("early", "p0", "d0", tbt_s=0.005)
    assert slow.arrival(newcomer("x"), 0.0) is RefusalReason.BEYOND_SLO


@pytest.mark.parametrize(("priority", "most"), [(-3, 9), (0, 9), (1, 9), (2, 8), (5, 5), (99, 5)])
def test_the_less_urgent_leave_room_for_others(priority, most):
    """Each step of priority above 0 gives a tenth less of the bound to wait in; nobody may wait longer than it."""
    made = filled("early", prefills=most, tbt_s=1.0)
    assert made.arrival(newcomer("x"), 0.0, priority) is None
    assert filled("early", prefills=most + 1, tbt_s=1.0).arrival(newcomer("x"), 0.0, priority) is PREFILL


def test_the_least_urgent_are_served_by_an_idle_service():
    """Even those that use up more of the bound alone than they may use of a busy one."""
    assert control("predicted", "p0", "d0", tbt_s=0.011).arrival(newcomer("x", prompt=900), 0.0, 5) is None


def test_rules_have_names():
    """An unknown one is refused in a sentence that has them all."""
    assert set(OVERLOADS) == {"none", "baseline", "early", "predicted"}
    with pytest.raises(ConfigurationError, match="'late': there are none, baseline, early, predicted"):
        create_overload("late")
