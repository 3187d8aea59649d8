"""Routers, and the load totals on which their decisions are based."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.routed import cluster, load, pools, predicted, request
from twofold.events import Route
from twofold.instance import Role
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, ROUTERS


def test_jsq_joins_the_shortest_queue_of_each_phase():
    """`jsq` chooses the fewest pending prompt tokens for prefill and the fewest reserved tokens for decode."""
    known = pools(
        load("p0", pending_prefill_tokens=50),
        load("p1", pending_prefill_tokens=20),
        load("d0", reserved_tokens=10),
        load("d1", reserved_tokens=30),
    )
    assert ROUTERS["jsq"]().route(request(), 109, known, 0.0) == Route("p1", "d0")


def test_jsq_variants_compare_what_they_are_named_after():
    """`jsq-pending` compares pending tokens and `jsq-requests` compares requests, in both phases."""
    known = pools(
        load("p0", pending_prefill_tokens=50, requests=1),
        load("p1", pending_prefill_tokens=20, requests=2),
        load("d0", decodes=2, requests=3, reserved_tokens=1),
        load("d1", decodes=1, requests=4, reserved_tokens=2),
    )
    assert ROUTERS["jsq-pending"]().route(request(), 109, known, 0.0) == Route("p1", "d1")
    assert ROUTERS["jsq-requests"]().route(request(), 109, known, 0.0) == Route("p0", "d0")


def test_ties_go_to_the_instance_that_joined_first():
    known = pools(load("p1"), load("p0"), load("d1"), load("d0"))
    assert ROUTERS["jsq"]().route(request(), 109, known, 0.0) == Route("p1", "d1")


def test_an_instance_is_avoided_unless_it_is_the_only_one():
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE])
    assert made.place_apart_from("prefill-0", request("a"), 0.0).route == Route("prefill-1", "decode-2")
    assert made.place_apart_from("decode-2", request("b"), 0.0).route == Route("prefill-0", "decode-2")
    made.pause("prefill-0")
    for name in ("c", "d"):
        assert made.place_apart_from("prefill-0", request(name), 0.0).route == Route("prefill-1", "decode-2")
    assert len(made.pools.prefill) == 1, "it stays paused"


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_a_mixed_instance_keeps_both_phases(router):
    made = cluster([Role.MIXED, Role.MIXED] if router in FIXED_ROLE_ROUTERS else [Role.MIXED], router)
    placement = made.place(request(), 0.0)
    assert placement is not None
    assert not placement.route.splits
    assert placement.mode is None


@pytest.mark.parametrize("router", FIXED_ROLE_ROUTERS)
def test_a_mixed_instance_decodes_for_a_prefill_instance(router):
    placement = cluster([Role.PREFILL, Role.MIXED], router).place(request(), 0.0)
    assert placement is not None
    assert placement.route == predicted("prefill-0", "mixed-1")


@pytest.mark.parametrize("router", FIXED_ROLE_ROUTERS)
def test_no_route_without_both_phases(router):
    for roles in ([], [Role.PREFILL], [Role.DECODE]):
        assert cluster(roles, router).place(request(), 0.0) is None


def test_no_route_in_an_empty_cluster():
    """Routers that change roles of instances cannot place requests in a cluster without instances."""
    for router in ("splitwise", "splitwise-sim"):
        assert cluster([], router).place(request(), 0.0) is None


def test_a_lost_instance_loses_its_requests():
    """A lost prefill instance loses requests not yet handed off; a lost decode instance loses all its requests."""
    made = cluster([Role.PREFILL, Role.DECODE])
    for name in "abc":
        made.place(request(name), 0.0)
    for name in "ab":
        made.first_token(name, 0.0)
    made.handed_off("a", 0.0, 0.0)
    assert made.remove_instance("prefill-0") == ["b", "c"], "b's KV cache is on its way, and its source is gone"
    assert made.remove_instance("decode-1") == ["a", "b", "c"]
    assert made.place(request("d"), 0.0) is None


def test_late_events_of_lost_requests_are_ignored():
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE])
    for name in "ab":
        made.place(request(name), 0.0)
    assert made.remove_instance("prefill-0") == ["a"]
    for name in ("a", "b", "nobody"):
        made.first_token(name, 0.0)
        made.handed_off(name, 0.0, 0.0)
        made.withdraw(name)
        made.withdraw(name)
    made.idle("prefill-0")
    for each in made.pools:
        assert (each.pending_prefill_tokens, each.reserved_tokens, each.requests) == (0, 0, 0)


def test_memory_is_counted_where_the_kv_cache_is():
    made = cluster([Role.PREFILL, Role.DECODE])
    made.place(request("a", prompt=100, output=10), 0.0)
    prefill, decode = made.pools
    assert (prefill.reserved_tokens, decode.reserved_tokens) == (100, 109)
    made.first_token("a", 0.0)
    assert (prefill.pending_prefill_tokens, prefill.prefills, prefill.reserved_tokens) == (0, 0, 100)
    made.handed_off("a", 0.0, 0.0)
    assert (prefill.requests, prefill.reserved_tokens, decode.reserved_tokens) == (0, 0, 109)


def test_a_request_that_no_instance_could_ever_hold_is_refused():
    for router in sorted(ROUTERS):
        made = cluster([Role.PREFILL, Role.DECODE], router, capacity_tokens=100)
        assert made.place(request("a", prompt=60, output=41), 0.0) is not None, router
        assert made.place(request("b", prompt=60, output=42), 0.0) is None, router


def test_a_prompt_that_its_prefill_instance_could_never_hold_is_refused():
    made = cluster([], "jsq")
    made.add_instance("p", Role.PREFILL, 50)
    made.add_instance("d", Role.DECODE, 1000)
    assert made.place(request("a", prompt=51, output=10), 0.0) is None


@pytest.mark.parametrize("router", ["splitwise", "splitwise-sim"])
def test_a_refused_request_moves_no_instance(router):
    made = cluster([Role.PREFILL, Role.DECODE], router, capacity_tokens=100)
    assert made.place(request("a", prompt=60, output=42), 0.0) is None
    assert [each.role for each in made.pools] == [Role.PREFILL, Role.DECODE]


# Sizes of a request, and the last of its steps: placed, prefilled, handed off.
placed = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 50), st.integers(0, 2)))


@settings(max_examples=300)
@given(st.sampled_from(sorted(ROUTERS)), st.sampled_from([None, 600, 2000]), placed, st.randoms(use_true_random=False))
def test_loads_return_to_zero_when_all_requests_end(router, capacity, sizes, draw):
    """When all requests have ended, all loads are zero."""
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], router, capacity_tokens=capacity)
    for number, (prompt, output, progress) in enumerate(sizes):
        for each in made.pools:
            each.queued = partial(int, draw.random() < 0.5)
        assert made.place(request(str(number), prompt, output), 0.0) is not None
        if progress > 0:
            made.first_token(str(number), 0.0)
        if progress > 1:
            made.handed_off(str(number), 0.0, 0.0)
    names = [str(number) for number in range(len(sizes))]
    draw.shuffle(names)
    for name in names:
        made.withdraw(name)
    for each in made.pools:
        made.idle(each.id)
        counted = (each.pending_prefill_tokens, each.reserved_tokens, each.requests)
        assert (*counted, each.prefills, each.decodes) == (0, 0, 0, 0, 0)
        assert each.role is each.home
