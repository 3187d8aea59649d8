"""The loads of instances as seen by one of several controllers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.routed import numbers, request
from twofold.handoff import HandoffMode
from twofold.instance import NO_LOAD, LoadTotals, Role
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.cluster.shared import LoadReport, OwnLoad, SharedCluster
from twofold.scheduling.routers import ROUTERS

BY_LAYER = FixedHandoff(HandoffMode.LAYER_WISE)
ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
EVENTS = {
    "first_token": lambda made, name: made.first_token(name, 0.0),
    "handed_off": lambda made, name: made.handed_off(name, 0.0, 0.0),
    "aborted": lambda made, name: made.aborted(name, 0.0),
}


def joined(made):
    for name, role in ROLES.items():
        made.add_instance(name, role)
    return made


def shared(own=OwnLoad.FOLLOWED):
    return joined(SharedCluster(ROUTERS["jsq"](), BY_LAYER, own=own))


def seen(cluster):
    return {load.id: numbers(load) for load in cluster.pools}


def report(made, controllers, name):
    """Return a load report for each controller."""
    total = made.pools.get(name).less(NO_LOAD)
    return [LoadReport(name, total, controller.own(name)) for controller in controllers]


def test_load_of_others_is_known_from_reports():
    mine, total = shared(), LoadTotals(1000, 500, 1, 0, 1)
    mine.place(request("a", prompt=100), 0.0)
    assert numbers(mine.own("p0")) == seen(mine)["p0"] == numbers(LoadTotals(100, 100, 1, 0, 1))
    mine.reported(LoadReport("p0", total, NO_LOAD))  # made before this controller's request arrived
    assert seen(mine)["p0"].pending_prefill_tokens == 1100
    mine.reported(LoadReport("p0", total, mine.own("p0")))  # made after it arrived
    assert seen(mine)["p0"].pending_prefill_tokens == 1000
    mine.withdraw("a")
    assert seen(mine)["p0"] == numbers(LoadTotals(900, 400, 0, 0, 0))


@pytest.mark.parametrize(("own", "sent", "done"), [("followed", 100, 0), ("sent", 100, 100), ("ignored", 0, 0)])
def test_own_load_depends_on_the_mode(own, sent, done):
    made = shared(OwnLoad(own))
    made.place(request("a", prompt=100), 0.0)
    assert seen(made)["p0"].pending_prefill_tokens == sent
    made.first_token("a", 1.0)
    made.handed_off("a", 0.0, 0.0)
    made.withdraw("a")
    made.withdraw("a")
    assert seen(made)["p0"].pending_prefill_tokens == done


def test_reports_on_unknown_instances_are_ignored():
    made = shared()
    made.reported(LoadReport("p0", LoadTotals(7), NO_LOAD))
    made.remove_instance("p0")
    made.reported(LoadReport("p0", LoadTotals(9), NO_LOAD))
    assert numbers(made.own("p0")) == numbers(NO_LOAD)
    made.add_instance("p0", Role.PREFILL)
    assert seen(made)["p0"] == numbers(NO_LOAD)


def test_reports_on_paused_instances_are_kept():
    made = shared()
    made.pause("p0")
    made.reported(LoadReport("p0", LoadTotals(50), NO_LOAD))
    made.resume("p0")
    assert made.place(request(), 0.0).route.prefill == "p1"


class Told(Router):
    """Router stub that returns a preset route."""

    def __init__(self):
        self.to = None

    def route(self, request, tokens, pools, now):
        return self.to


events = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", *EVENTS, "report", "hear"]), st.integers(0, 99), st.integers(0, 2)),
    max_size=80,
)


@settings(max_examples=200)
@given(events)
def test_a_single_controller_equals_the_cluster_scheduler(steps):
    alone, plain = shared(), joined(ClusterScheduler(ROUTERS["jsq"](), BY_LAYER))
    placed, under_way = 0, []
    for action, which, _ in steps:
        if action == "arrive":
            asked = request(str(placed), prompt=1 + which * 7, output=1 + which)
            assert alone.place(asked, 0.0).route == plain.place(asked, 0.0).route
            placed += 1
        elif action in EVENTS and placed:
            for made in (alone, plain):
                EVENTS[action](made, str(which % placed))
        elif action == "report":
            under_way += report(plain, [alone], list(ROLES)[which % 4])
        elif action == "hear" and under_way:
            alone.reported(under_way.pop(0))
        assert seen(alone) == seen(plain)


class Several:
    """Three controllers that share a cluster, and a reference scheduler that places the requests of all three."""

    def __init__(self, own):
        self.told = Told()
        self.truth = joined(ClusterScheduler(self.told, BY_LAYER))
        self.controllers = [shared(own) for _ in range(3)]
        self.whose, self.under_way = [], []

    def place(self, which, turn):
        asked = request(str(len(self.whose)), prompt=1 + which * 7, output=1 + which)
        self.told.to = self.controllers[turn].place(asked, 0.0).route
        self.truth.place(asked, 0.0)
        self.whose.append(self.controllers[turn])

    def happens(self, action, which):
        """Report an event of a request to the request's controller and to the reference scheduler."""
        if self.whose:
            number = which % len(self.whose)
            for made in (self.truth, self.whose[number]):
                EVENTS[action](made, str(number))

    def report(self, name):
        self.under_way.append(report(self.truth, self.controllers, name))

    def hear(self):
        if self.under_way:
            for controller, said in zip(self.controllers, self.under_way.pop(0), strict=True):
                controller.reported(said)


@settings(max_examples=300)
@given(events, st.sampled_from(list(OwnLoad)))
def test_controllers_agree_after_all_reports(steps, own):
    several = Several(own)
    for action, which, turn in steps:
        if action == "arrive":
            several.place(which, turn)
        elif action in EVENTS:
            several.happens(action, which)
        elif action == "report":
            several.report(list(ROLES)[which % 4])
        else:
            several.hear()
        for each in (load for controller in several.controllers for load in controller.pools):
            assert each.pending_prefill_tokens >= 0
            assert each.reserved_tokens >= 0
    for name in ROLES:
        several.report(name)
    while several.under_way:
        several.hear()
    assert all(seen(controller) == seen(several.truth) for controller in several.controllers)
