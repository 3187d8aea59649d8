"""Clocks of other hosts in terms of ours."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.serving.controller.heartbeat import DRIFT, ClockOffset


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.0001, 3)), min_size=1, max_size=50),
    st.floats(-1e6, 1e6),
    st.floats(-DRIFT / 2, DRIFT / 2),
)
def test_a_moment_is_not_early_and_late_by_the_quickest_message_at_most(messages, offset, drift):
    """And by what the clocks may have drifted apart since."""
    theirs = lambda moment: (moment - offset) * (1 + drift)  # noqa: E731
    sent, quickest = 0.0, None
    clock = None
    for pause, delay in messages:
        sent += pause
        quickest = delay if quickest is None else min(quickest, delay)
        if clock is None:
            clock = ClockOffset(theirs(sent), sent + delay)
        else:
            clock.heard(theirs(sent), sent + delay)
    error = clock.ours(theirs(sent)) - sent
    slack = 2 * DRIFT * (sent + max(delay for _, delay in messages)) + 1e-6
    assert -slack <= error <= quickest + slack


def test_an_hour_of_drift_is_followed():
    """The quickest message of an hour ago says nothing about now."""
    clock = ClockOffset(0.0, 0.001)
    drift = 4e-5
    for second in range(1, 3600):
        clock.heard(second * (1 + drift), second + 0.001)
    assert abs(clock.ours(3599 * (1 + drift)) - 3599) < 0.01
