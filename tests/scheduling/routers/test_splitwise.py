"""Splitwise's rules for routing and role changes (section 4.1)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.routed import cluster, load, pools, request
from twofold.events import Route
from twofold.instance import Role
from twofold.route import RoleMove
from twofold.scheduling.cluster.pools import pending_tokens
from twofold.scheduling.routers.splitwise import SplitwiseRouter, SplitwiseSimRouter

THRESHOLD = 8192
TOKENS = 109  # KV tokens of the request at full length


def route(*loads, prompt=100, tokens=TOKENS):
    return SplitwiseRouter().route(request(prompt=prompt), tokens, pools(*loads), 0.0)


def long(name, **more):
    """Return the load of an instance with a long prefill queue."""
    return load(name, queued=1, pending_prefill_tokens=THRESHOLD, **more)


def full(name, **more):
    return load(name, capacity=1000, reserved_tokens=1000, **more)


def to_mixed(name):
    return RoleMove(name, Role.MIXED)


def test_picks_fewest_pending_tokens_and_least_memory():
    busy = load("p0", pending_prefill_tokens=20, decodes=5)
    assert route(busy, load("p1", pending_prefill_tokens=24), load("d0", reserved_tokens=9), load("d1")) == Route(
        "p1", "d1"
    )


@pytest.mark.parametrize(
    ("queued", "pending", "prompt", "stays"),
    [(1, 8092, 100, True), (1, 8093, 100, False), (0, 8093, 100, True), (0, 0, 9000, True), (1, 0, 8193, False)],
)
def test_a_long_queue_exceeds_the_threshold_with_waiting_work(queued, pending, prompt, stays):
    first = load("p0", queued=queued, pending_prefill_tokens=pending)
    made = route(first, load("m0"), load("d0"), prompt=prompt)
    assert made == Route("p0" if stays else "m0", "d0")


def test_the_mixed_pool_is_used_before_taking_an_instance():
    assert route(long("p0"), load("m0"), load("m1", decodes=1), load("d0")) == Route("m0", "d0")
    assert route(load("p0"), load("m0"), load("m1", reserved_tokens=1), full("d0")) == Route("p0", "m0")


def test_a_long_prefill_queue_takes_a_decode_instance():
    made = route(
        long("p0"), long("m0"), load("d0", decodes=3, reserved_tokens=1), load("d1", decodes=2, reserved_tokens=2)
    )
    assert made == Route("d1", "d0", (to_mixed("d1"),))


def test_a_full_decode_pool_takes_a_prefill_instance():
    made = route(
        load("p0", reserved_tokens=50), load("p1", reserved_tokens=40, pending_prefill_tokens=7), full("m0"), full("d0")
    )
    assert made == Route("p0", "p1", (to_mixed("p1"),))


def test_a_taken_instance_keeps_its_decodes():
    assert route(long("p0"), load("d0")) == Route("d0", "d0", (to_mixed("d0"),))


def test_falls_back_to_the_fewest_pending_tokens():
    assert route(long("m0", decodes=9), long("m1", decodes=3)) == Route("m1", "m1")
    assert route(full("m0", decodes=5), full("m1", decodes=4)) == Route("m1", "m1")
    assert route(long("p0"), load("m0", queued=1, pending_prefill_tokens=8190)) == Route("m0", "m0")


def test_just_moved_instances_rank_last():
    crowd = full("m0", queued=1, pending_prefill_tokens=THRESHOLD)
    made = route(crowd, full("d0", pending_prefill_tokens=THRESHOLD))
    assert made == Route("m0", "m0", (to_mixed("d0"),))


@pytest.mark.parametrize(("tokens", "fits"), [(100, True), (101, False)])
def test_skips_instances_without_kv_memory(tokens, fits):
    made = route(load("p0"), load("m0"), load("d0", capacity=1000, reserved_tokens=900), tokens=tokens)
    assert made == Route("p0", "d0" if fits else "m0")


def test_unknown_capacity_accepts_all():
    assert route(load("p0"), load("d0", reserved_tokens=10**12)) == Route("p0", "d0")


# -- roles ----------------------------------------------------------------------------------------------------------


def crowded():
    """Return a cluster with a long prefill queue, and the loads of its two instances."""
    made = cluster([Role.PREFILL, Role.DECODE], "splitwise")
    prefill, decode = made.pools
    made.place(request("first", prompt=THRESHOLD), 0.0)
    prefill.queued = lambda: 1
    return made, prefill, decode


def test_returns_home_without_work_of_the_other_phase():
    made, prefill, decode = crowded()
    moved = []
    made.on_role_change = lambda name, role: moved.append((name, role))
    assert made.place(request("second"), 0.0).route == Route("decode-1", "decode-1", (to_mixed("decode-1"),))
    assert moved == [("decode-1", Role.MIXED)]
    assert (len(made.pools.decode), len(made.pools.mixed)) == (0, 1)
    assert made.place(request("third"), 0.0).route.prefill == "decode-1", "it is in the mixed pool now"
    made.first_token("second", 0.0)
    assert decode.role is Role.MIXED
    made.first_token("third", 0.0)
    assert (decode.role, decode.decodes) == (Role.DECODE, 3)
    assert moved == [("decode-1", Role.MIXED), ("decode-1", Role.DECODE)]
    assert prefill.role is Role.PREFILL


def test_a_prefill_instance_returns_after_its_last_decode():
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE], "splitwise", capacity_tokens=1000)
    made.place(request("first", prompt=600), 0.0)
    placement = made.place(request("second", prompt=500), 0.0)
    assert placement.route.moves == (to_mixed(placement.route.decode),)
    helper = made.pools.get(placement.route.decode)
    made.place(request("third", prompt=10), 0.0)
    made.first_token("second", 0.0)
    made.handed_off("second", 0.0, 0.0)
    assert helper.role is Role.MIXED
    made.withdraw("second")
    assert helper.role is Role.PREFILL


def test_splitwise_sim_returns_only_when_idle():
    made = cluster([Role.PREFILL, Role.DECODE], "splitwise-sim")
    prefill, decode = made.pools
    made.place(request("first", prompt=THRESHOLD), 0.0)
    prefill.queued = lambda: 1
    made.place(request("second"), 0.0)
    made.withdraw("second")
    assert decode.role is Role.MIXED
    made.idle("decode-1")
    assert decode.role is Role.DECODE


def test_instances_started_mixed_stay_mixed():
    for router in (SplitwiseRouter(), SplitwiseSimRouter()):
        for idle in (False, True):
            assert router.role_of(load("m0"), idle) is Role.MIXED
            assert router.role_of(load("p0", decodes=1), idle) is Role.PREFILL
            assert router.role_of(load("d0", prefills=1), idle) is Role.DECODE


numbers = st.tuples(
    st.sampled_from([0, 50, 8100, 9000]), st.sampled_from([0, 500, 950]), st.integers(0, 2), st.booleans()
)
clusters = st.lists(st.tuples(st.sampled_from("pmd"), numbers), min_size=1, max_size=8)


def known(specs):
    return [
        load(
            f"{letter}{i}",
            capacity=1000,
            pending_prefill_tokens=pending,
            reserved_tokens=reserved,
            decodes=decodes,
            queued=queued,
        )
        for i, (letter, (pending, reserved, decodes, queued)) in enumerate(specs)
    ]


@settings(max_examples=500)
@given(clusters)
def test_routes_follow_the_rules_and_change_nothing(specs):
    loads = known(specs)
    made, router = pools(*loads), SplitwiseRouter()
    chosen = router.route(request(), TOKENS, made, 0.0)
    assert chosen is not None
    assert [each.role for each in loads] == [each.home for each in loads]
    assert router.route(request(), TOKENS, made, 0.0) == chosen
    for move in chosen.moves:
        assert move.role is Role.MIXED
        assert made.get(move.instance).role is not Role.MIXED
    prefill, decode = made.get(chosen.prefill), made.get(chosen.decode)
    if chosen.splits:
        assert prefill.role is not Role.DECODE or to_mixed(prefill.id) in chosen.moves
        assert decode.role is not Role.PREFILL or to_mixed(decode.id) in chosen.moves
        assert decode.role is Role.PREFILL or decode.reserved_tokens + TOKENS <= 1000
        if prefill.role is not Role.DECODE:
            assert not prefill.queued() or pending_tokens.of(prefill) + 100 <= THRESHOLD
