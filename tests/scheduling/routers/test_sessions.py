"""Turns of a session stay on its instances until these are overloaded, gone or have another role."""

import msgspec
import pytest

from support.routed import cluster, load, pools, request
from twofold.events import Route
from twofold.instance import Role
from twofold.scheduling.routers.sessions import SessionAffinity

TOKENS = 110


def turn(session="s"):
    return msgspec.structs.replace(request(), session=session)


@pytest.fixture
def made():
    return pools(load("p0"), load("p1"), load("d0"), load("d1"))


def test_turns_stay_on_the_instances_of_their_session(made):
    router = SessionAffinity()
    assert router.route(turn(), TOKENS, made, 0.0) == Route("p0", "d0")
    made = pools(load("p0", pending_prefill_tokens=TOKENS), load("p1"), load("d0", reserved_tokens=TOKENS), load("d1"))
    assert router.route(turn("another"), TOKENS, made, 0.0) == Route("p1", "d1")
    assert router.route(turn(), TOKENS, made, 0.0) == Route("p0", "d0")


def test_requests_without_a_session_join_the_shortest_queue():
    router = SessionAffinity()
    for least in ("p0", "p1", "p0"):
        loads = [load(name, pending_prefill_tokens=0 if name == least else 50) for name in ("p0", "p1")]
        assert router.route(turn(""), TOKENS, pools(*loads, load("d0")), 0.0) == Route(least, "d0")


def test_an_overloaded_instance_loses_the_session(made):
    router = SessionAffinity(slack=2.0)
    router.route(turn(), TOKENS, made, 0.0)
    made = pools(load("p0", pending_prefill_tokens=2 * 40 + TOKENS), load("p1", pending_prefill_tokens=40), load("d0"))
    assert router.route(turn(), TOKENS, made, 0.0).prefill == "p0"
    made = pools(load("p0", pending_prefill_tokens=2 * 40 + TOKENS + 1), *list(made)[1:])
    assert router.route(turn(), TOKENS, made, 0.0).prefill == "p1"
    assert router.route(turn(), TOKENS, pools(load("p0"), *list(made)[1:]), 0.0).prefill == "p1", "it has moved"


def test_a_session_moves_if_its_instance_has_gone_or_changed_its_role():
    router = SessionAffinity()
    made = cluster([Role.MIXED, Role.MIXED])
    assert router.route(turn(), TOKENS, made.pools, 0.0) == Route("mixed-0", "mixed-0")
    made.pause("mixed-0")
    assert router.route(turn(), TOKENS, made.pools, 0.0) == Route("mixed-1", "mixed-1")
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE], "jsq-planned")
    router = SessionAffinity()
    assert router.route(turn(), TOKENS, made.pools, 0.0) == Route("prefill-0", "decode-2")
    made.set_role("prefill-0", Role.DECODE)
    assert router.route(turn(), TOKENS, made.pools, 0.0).prefill == "prefill-1"
