"""Routing to the shortest queue while re-planning changes the roles of instances."""

from support.routed import cluster, load, pools, request
from twofold.events import Route
from twofold.instance import Role
from twofold.scheduling.routers.jsq import PlannedRoles


def route(*loads):
    return PlannedRoles().route(request(), 109, pools(*loads), 0.0)


def test_each_phase_goes_to_the_least_loaded():
    loads = [load("p0", pending_prefill_tokens=9), load("p1"), load("d0", reserved_tokens=5), load("d1")]
    assert route(*loads) == Route("p1", "d1")


def test_an_empty_phase_runs_on_other_instances():
    assert route(load("d0"), load("d1", pending_prefill_tokens=5)) == Route("d0", "d0")
    assert route(load("p0")) == Route("p0", "p0")
    assert route(load("p0"), load("m0")) == Route("p0", "m0")
    assert route() is None


def test_set_role_changes_the_routing():
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE], "jsq-planned")
    made.place(request("a"), 0.0)
    made.set_role("prefill-0", Role.DECODE)
    assert made.place(request("b"), 0.0).route == Route("prefill-1", "prefill-0")
    for name in "ab":
        made.withdraw(name)
    made.idle("prefill-0")
    assert made.pools.get("prefill-0").role is Role.DECODE
