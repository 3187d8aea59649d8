"""The event kernel of the simulator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.cluster.timing import PS, nearest, ps
from twofold.simulation.kernel import EventOrder, Kernel


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([EventOrder.COMPLETION, EventOrder.TRANSFER, EventOrder.ARRIVAL]))
    )
)
def test_orders_events_by_time_then_kind_then_scheduling(events):
    kernel, happened = Kernel(), []
    for number, (at, order) in enumerate(events):
        kernel.schedule(at, order, happened.append, (at, order, number))
    assert not kernel.run(until_events=1000)
    assert happened == sorted(happened)
    assert kernel.events == len(events)


def test_rejects_events_in_the_past():
    kernel = Kernel()
    kernel.schedule(10, EventOrder.ARRIVAL, lambda _: kernel.schedule(9, EventOrder.ARRIVAL, print))
    with pytest.raises(ValueError, match="in the past"):
        kernel.run(until_events=10)


def test_runs_in_parts():
    """`run` stops after `until_events` events and continues on the next call."""
    kernel, happened = Kernel(), []
    for at in range(5):
        kernel.schedule(at, EventOrder.ARRIVAL, happened.append, at)
    assert kernel.run(until_events=3)
    assert happened == [0, 1, 2]
    assert not kernel.run(until_events=9)
    assert happened == [0, 1, 2, 3, 4]


def test_rounds_seconds_to_picoseconds():
    assert ps(1.5) == 3 * PS // 2
    assert ps(1e-12) == 1


@given(st.floats(0, 1e17) | st.integers(0, 2**54).map(lambda halves: halves / 2))
def test_nearest_equals_round(number):
    """`nearest` rounds halves to the even integer, like `round`."""
    assert nearest(number) == round(number)
