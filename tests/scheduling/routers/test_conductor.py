"""Mooncake's Conductor: routing by predicted queueing, transfer and prefill time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.predicted import BLOCK_TOKENS, Proportional, forecast
from support.routed import cluster, load, pools, predicted, request
from twofold.instance import Role
from twofold.route import PrefixFetch
from twofold.scheduling.routers.forecasting import Conductor

KEYS = tuple(range(10))


def known(*names, transfer_s=0.1):
    made = pools(*map(load, names))
    made.forecast = forecast(*names, prediction=Proportional(transfer_s=transfer_s))
    return made


def route(made, fetches=True, blocks=KEYS):
    return Conductor(fetches).route(request(prompt=1000, blocks=blocks), 1009, made, 0.0)


def test_routes_to_the_cached_prefix():
    made = known("p0", "p1", "d0")
    made.forecast.prefixes.stored("p1", KEYS[:8])
    found = route(made, fetches=False)
    assert found == predicted("p1", "d0", 800)
    assert found.ttft_s == pytest.approx(2.0)


def test_a_long_queue_outweighs_a_prefix():
    made = known("p0", "p1", "d0")
    made.forecast.prefixes.stored("p1", KEYS[:3])
    made.forecast.placed("x", "p1", 400, 0, 0.0)
    found = route(made, fetches=False)
    assert found == predicted("p0", "d0")
    assert found.ttft_s == pytest.approx(10.0)


def test_fetches_hot_blocks():
    made = known("p0", "p1", "d0")
    made.forecast.prefixes.stored("p1", KEYS[:8])
    made.forecast.placed("x", "p1", 400, 0, 0.0)
    made.forecast.placed("y", "p0", 100, 0, 0.0)
    found = route(made)
    assert found == predicted("p0", "d0", 800, PrefixFetch("p1", 8))
    assert found.ttft_s == pytest.approx(1.0 + 2.0)


def test_transfer_counts_missing_blocks_only():
    made = known("p0", "p1", "d0", transfer_s=0.5)
    made.forecast.prefixes.stored("p1", KEYS[:8])
    made.forecast.prefixes.stored("p0", KEYS[:5])
    made.forecast.placed("x", "p1", 900, 0, 0.0)
    found = route(made)
    assert found == predicted("p0", "d0", 800, PrefixFetch("p1", 8))
    assert found.ttft_s == pytest.approx(3 * 0.5 + 2.0)


def test_the_last_output_of_a_session_is_fetched_from_the_decode_instance():
    made = known("p0", "d0")
    made.forecast.prefixes.stored("p0", KEYS[:8])
    made.forecast.prefixes.stored("d0", KEYS[:9])
    assert route(made) == predicted("p0", "d0", 900, PrefixFetch("d0", 9))


def test_no_fetch_if_computing_is_faster():
    made = known("p0", "p1", "d0", transfer_s=5.0)
    made.forecast.prefixes.stored("p1", KEYS[:8])
    made.forecast.placed("x", "p1", 10_000, 0, 0.0)
    assert route(made) == predicted("p0", "d0")


def test_a_fully_cached_prompt_computes_its_last_token():
    made = known("p0", "d0")
    made.forecast.prefixes.stored("p0", KEYS)
    assert route(made) == predicted("p0", "d0", 999)


def test_instances_share_the_cache_of_their_host():
    made = known("p0", "p1", "d0")
    for name in ("p0", "p1"):
        made.get(name).cache = "host"
    made.forecast.prefixes.stored("host", KEYS[:4])
    made.forecast.placed("x", "p0", 100, 0, 0.0)
    assert route(made) == predicted("p1", "d0", 400)


def test_private_blocks_are_not_fetched():
    made = known("p0", "p1", "d0")
    for name in ("p0", "p1"):
        made.get(name).cache = f"host of {name}"
    made.forecast.memories.stored("p1", KEYS[:8])
    assert route(made) == predicted("p1", "d0", 800)
    made.forecast.placed("x", "p1", 10_000, 0, 0.0)
    assert route(made) == predicted("p0", "d0"), "private blocks were fetched"
    made.forecast.prefixes.stored("host of p1", KEYS[:6])
    assert route(made) == predicted("p0", "d0", 600, PrefixFetch("host of p1", 6))
    made.forecast.memories.stored("p0", KEYS[:7])
    assert route(made) == predicted("p0", "d0", 700)


def test_would_place_changes_nothing():
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE], "conductor")
    for name in "abcd":
        said = [made.would_place(request(name), 0.0).route for _ in range(3)]
        assert said == [made.place(request(name), 0.0).route] * 3
    assert made.would_place(request("e", prompt=10), 0.0).route.prefill == "prefill-0"


def test_a_mixed_instance_runs_both_phases_without_prefill_pool():
    made = known("m0", "m1")
    made.forecast.prefixes.stored("m1", KEYS[:4])
    assert route(made) == predicted("m1", "m1", 400)


def test_cluster_scheduler_updates_the_forecast():
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE], "conductor")
    first, second, third = (made.place(request(name), 0.0).route.prefill for name in "abc")
    assert (first, second) == ("prefill-0", "prefill-1")
    assert third == "prefill-0", "both wait equally long"
    made.first_token("b", 1.0)
    assert made.pools.forecast.queue_s("prefill-1", 1.0) == 0.0
    made.withdraw("a")
    assert made.pools.forecast.queue_s("prefill-0", 1.0) == pytest.approx(1.0)
    made.remove_instance("prefill-0")
    assert made.place(request("d"), 1.0).route.prefill == "prefill-1"


def test_requires_a_forecast():
    with pytest.raises(RuntimeError, match="needs a forecast"):
        Conductor().route(request(), 109, pools(load("p0"), load("d0")), 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 2000)), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.5, 2.0]),
)
def test_picks_the_least_ttft(instances, fetches, transfer_s):
    names = [f"p{i}" for i in range(len(instances))]
    made = known(*names, "d0", transfer_s=transfer_s)
    for name, (blocks, queue) in zip(names, instances, strict=True):
        made.forecast.prefixes.stored(name, KEYS[:blocks])
        if queue:
            made.forecast.placed(f"on {name}", name, queue, 0, 0.0)
    best = max(blocks for blocks, _ in instances)
    expected = {}
    for name, (blocks, queue) in zip(names, instances, strict=True):
        waits = queue / BLOCK_TOKENS
        ways = [waits + (1000 - min(999, blocks * 100)) / 100]
        if fetches and blocks < best:
            ways.append(max(waits, transfer_s * (best - blocks)) + (1000 - min(999, best * 100)) / 100)
        expected[name] = min(ways)
    found = route(made, fetches)
    assert found.ttft_s == pytest.approx(min(expected.values()))
    assert expected[found.prefill] == pytest.approx(found.ttft_s)
    own = instances[names.index(found.prefill)][0]
    if found.fetch is None:
        assert found.reused_tokens == min(999, own * 100)
    else:
        assert found.fetch.blocks == best > own
        assert instances[names.index(found.fetch.source)][0] == best
        assert found.reused_tokens == min(999, best * 100)
