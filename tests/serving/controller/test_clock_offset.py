"""Conversion of times between the monotonic clocks of two hosts."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.serving.controller.heartbeat import DRIFT, ClockOffset


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.0001, 3)), min_size=1, max_size=50),
    st.floats(-1e6, 1e6),
    st.floats(-DRIFT / 2, DRIFT / 2),
)
def test_a_converted_time_is_late_by_at_most_the_shortest_delay(messages, offset, drift):
    theirs = lambda moment: (moment - offset) * (1 + drift)  # noqa: E731
    sent, quickest = 0.0, None
    clock = None
    for pause, delay in messages:
        sent += pause
        quickest = delay if quickest is None else min(quickest, delay)
        if clock is None:
            clock = ClockOffset(theirs(sent), sent + delay)
        else:
            clock.update(theirs(sent), sent + delay)
    error = clock.to_local(theirs(sent)) - sent
    slack = 2 * DRIFT * (sent + max(delay for _, delay in messages)) + 1e-6
    assert -slack <= error <= quickest + slack


def test_drift_is_tracked_over_an_hour():
    clock = ClockOffset(0.0, 0.001)
    drift = 4e-5
    for second in range(1, 3600):
        clock.update(second * (1 + drift), second + 0.001)
    assert abs(clock.to_local(3599 * (1 + drift)) - 3599) < 0.01
