"""The numbers of a load by themselves."""

from support.routed import load
from twofold.scheduling.amounts import Amounts, amounts_of, exchange


def test_amounts_are_those_of_the_load_at_that_moment():
    """What changes later does not change them."""
    one = load("p0", pending_prefill_tokens=5, reserved_tokens=4, prefills=3, decodes=2, requests=1)
    then = amounts_of(one)
    one.pending_prefill_tokens = 50
    assert then == Amounts(5, 4, 3, 2, 1)
    assert {then} == {Amounts(5, 4, 3, 2, 1)}
    assert repr(then) == "Amounts(5, 4, 3, 2, 1)"


def test_what_is_counted_can_be_exchanged():
    """The rest of the load stays."""
    one = load("p0", pending_prefill_tokens=50, reserved_tokens=40, prefills=30, decodes=20, requests=10)
    exchange(one, Amounts(5, 4, 3, 2, 1), Amounts(1, 1, 1, 1, 1))
    assert amounts_of(one) == Amounts(46, 37, 28, 19, 10)
    assert amounts_of(one).less(Amounts(1, 2, 3, 4, 5)) == Amounts(45, 35, 25, 15, 5)
