"""Load totals of an instance: pending tokens, reserved tokens and requests."""

from support.routed import load, numbers
from twofold.instance import NO_LOAD, LoadTotals


def test_less_nothing_is_a_snapshot():
    one = load("p0", pending_prefill_tokens=5, reserved_tokens=4, prefills=3, decodes=2, requests=1)
    then = one.less(NO_LOAD)
    one.pending_prefill_tokens = 50
    assert numbers(then) == numbers(LoadTotals(5, 4, 3, 2, 1))


def test_replacing_totals_keeps_other_load():
    one = load("p0", pending_prefill_tokens=50, reserved_tokens=40, prefills=30, decodes=20, requests=10)
    one.replace(LoadTotals(5, 4, 3, 2, 1), LoadTotals(1, 1, 1, 1, 1))
    assert numbers(one) == numbers(LoadTotals(46, 37, 28, 19, 10))
    less = one.less(LoadTotals(1, 2, 3, 4, 5))
    assert numbers(less) == numbers(LoadTotals(45, 35, 25, 15, 5))
