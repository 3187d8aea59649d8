"""Closed-loop load on a simulated cluster."""

from itertools import count, islice

import pytest

from support.toy import CATALOG
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.request import Request
from twofold.simulation.clients import ClosedLoop
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.timeline import Moment

COLOCATED = ClusterSpec(
    pools=(PoolSpec(machines=1, machine="dgx-h100", role=Role.MIXED),), model="llama2-70b", router="jsq"
)


class InFlight(Observer):
    """Counts the requests under way, and keeps the timelines."""

    def __init__(self):
        self.now, self.most, self.timelines = 0, 0, []

    def arrived(self, request, now):
        self.now += 1
        self.most = max(self.most, self.now)

    def ended(self, timeline, now):
        self.now -= 1
        self.timelines.append(timeline)


def requests(number=None):
    return (
        Request(id=str(place), arrival_s=0.0, prompt_tokens=500 + 10 * (place % 7), output_tokens=20 + place % 5)
        for place in islice(count(), number)
    )


def run(loop):
    seen = InFlight()
    return simulate(COLOCATED, (), catalog=CATALOG, observers=[seen], prepare=loop.attach), seen


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_as_many_requests_as_clients_are_in_flight(clients):
    result, seen = run(ClosedLoop(requests(60), clients))
    assert result.completed == result.arrived == 60
    assert seen.most == clients
    # Little's law, but for the last requests of the clients that end first
    in_flight = sum(timeline.e2e_s for timeline in seen.timelines) / result.duration_s
    assert in_flight == pytest.approx(clients, rel=0.3)


def test_a_client_sends_its_next_request_after_the_think_time():
    result, seen = run(ClosedLoop(requests(5), 1, think_s=2.0))
    arrivals = [timeline.moments[Moment.ARRIVED] for timeline in seen.timelines]
    ends = [timeline.moments[Moment.LAST_TOKEN] for timeline in seen.timelines]
    assert [later - end for end, later in zip(ends, arrivals[1:], strict=False)] == pytest.approx([2.0] * 4)
    assert result.completed == 5


def test_a_duration_ends_the_sending():
    result, seen = run(ClosedLoop(requests(), 3, duration_s=10.0))
    assert max(timeline.moments[Moment.ARRIVED] for timeline in seen.timelines) < 10.0
    assert result.completed == result.arrived
    assert result.duration_s >= 10.0


@pytest.mark.parametrize(("clients", "think_s"), [(0, 0.0), (1, -1.0), (1, float("inf"))])
def test_impossible_loops_are_refused(clients, think_s):
    with pytest.raises(ConfigurationError, match=r"at least (one client|0 s)"):
        ClosedLoop(requests(1), clients, think_s=think_s)
