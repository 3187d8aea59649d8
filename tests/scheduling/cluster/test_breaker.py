"""Whether an instance that failed may be trusted again."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.cluster.breaker import Breaker, BreakerState


def test_an_instance_that_never_failed_is_trusted():
    """Its first start needs no probe."""
    breaker = Breaker()
    breaker.back(1.0)
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.begin("a")
    assert breaker.admits


def test_one_request_at_a_time_shows_whether_it_works():
    """Back after a failure it is given one request, and all that come once that one has a token."""
    breaker = Breaker()
    breaker.fail(0.0)
    assert not breaker.admits
    breaker.back(1.0)
    assert breaker.admits
    assert breaker.begin("a")
    assert not breaker.admits
    assert not breaker.succeed("b", 2.0)
    assert breaker.succeed("a", 2.0)
    assert breaker.state is BreakerState.CLOSED


def test_a_probe_that_ends_early_shows_nothing():
    """Its client went away: the next request is the probe."""
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
    """A worker that dies at once is not started a hundred times a second."""
    breaker = Breaker(longest_s)
    waits = []
    for _ in range(failures):
        waits.append(breaker.fail(0.0))
        breaker.back(0.0)
    assert waits == [min(longest_s, Breaker.FIRST_S * 2.0**n) for n in range(failures)]


def test_one_that_worked_for_long_begins_anew():
    """Failures of last week do not count."""
    breaker = Breaker()
    for now in range(5):
        breaker.fail(float(now))
        breaker.back(float(now))
    breaker.begin("a")
    breaker.succeed("a", 10.0)
    assert breaker.fail(10.0 + Breaker.HEALED_S) == 10.0 + Breaker.HEALED_S + Breaker.FIRST_S
