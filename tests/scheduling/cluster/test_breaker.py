"""The circuit breaker of a failing instance."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.cluster.breaker import Breaker, BreakerState


def test_first_start_needs_no_probe():
    breaker = Breaker()
    breaker.back(1.0)
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.begin("a")


def test_half_open_admits_one_request_at_a_time():
    breaker = Breaker()
    breaker.fail(0.0)
    assert not breaker.begin("a")
    breaker.back(1.0)
    assert breaker.begin("a")
    assert not breaker.begin("b")
    assert not breaker.succeed("b", 2.0)
    assert breaker.succeed("a", 2.0)
    assert breaker.state is BreakerState.CLOSED


def test_an_aborted_probe_is_repeated():
    breaker = Breaker()
    breaker.fail(0.0)
    breaker.back(1.0)
    breaker.begin("a")
    assert not breaker.release("b")
    assert breaker.release("a")
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.begin("c")


@given(st.integers(1, 40), st.floats(0.1, 100.0))
def test_each_failure_doubles_the_wait_up_to_a_limit(failures, longest_s):
    breaker = Breaker(longest_s)
    waits = []
    for _ in range(failures):
        waits.append(breaker.fail(0.0))
        breaker.back(0.0)
    assert waits == [min(longest_s, Breaker.FIRST_S * 2.0**n) for n in range(failures)]


def test_long_uptime_resets_the_wait():
    breaker = Breaker()
    for now in range(5):
        breaker.fail(float(now))
        breaker.back(float(now))
    breaker.begin("a")
    breaker.succeed("a", 10.0)
    assert breaker.fail(10.0 + Breaker.HEALED_S) == 10.0 + Breaker.HEALED_S + Breaker.FIRST_S
