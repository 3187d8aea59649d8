"""The Conductor: transfer, queue and prefill weighed against each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.predicted import BLOCK_TOKENS, Proportional, forecast
from support.routed import cluster, load, pools, request
from twofold.instance import Role
from twofold.placement import PrefixFetch, Route
from twofold.scheduling.routers.conductor import Conductor

KEYS = tuple(range(10))


def known(*names, transfer_s=0.1):
    made = pools(*map(load, names))
    made.forecast = forecast(*names, prediction=Proportional(transfer_s=transfer_s))
    return made


def route(made, threshold=1.5, blocks=KEYS):
    return Conductor(threshold).route(request(prompt=1000, blocks=blocks), 1009, made, 0.0)


def test_a_prompt_goes_where_its_prefix_is():
    """All that is not there would have to be computed."""
    made = known("p0", "p1", "d0")
    made.forecast.prefixes.stored("p1", KEYS[:8])
    found = route(made, threshold=None)
    assert found == Route("p1", "d0", (), 800)
    assert found.ttft_s == pytest.approx(2.0)


def test_a_long_queue_outweighs_a_prefix():
    """With nothing fetched the prompt is computed again elsewhere, and its blocks are then on both."""
    made = known("p0", "p1", "d0")
    made.forecast.prefixes.stored("p1", KEYS[:3])
    made.forecast.placed("x", "p1", 400, 0, 0.0)
    found = route(made, threshold=None)
    assert found == Route("p0", "d0")
    assert found.ttft_s == pytest.approx(10.0)


def test_blocks_that_are_in_demand_travel():
    """The one that has them is busy: another fetches them, and waits for them beside its own queue."""
    made = known("p0", "p1", "d0")
    made.forecast.prefixes.stored("p1", KEYS[:8])
    made.forecast.placed("x", "p1", 400, 0, 0.0)
    made.forecast.placed("y", "p0", 100, 0, 0.0)
    found = route(made)
    assert found == Route("p0", "d0", (), 800, PrefixFetch("p1", 8))
    assert found.ttft_s == pytest.approx(1.0 + 2.0)


def test_only_what_is_missing_is_counted_as_transfer():
    """An instance that has some of the prefix fetches the rest."""
    made = known("p0", "p1", "d0", transfer_s=0.5)
    made.forecast.prefixes.stored("p1", KEYS[:8])
    made.forecast.prefixes.stored("p0", KEYS[:5])
    made.forecast.placed("x", "p1", 900, 0, 0.0)
    found = route(made)
    assert found == Route("p0", "d0", (), 800, PrefixFetch("p1", 8))
    assert found.ttft_s == pytest.approx(3 * 0.5 + 2.0)


@pytest.mark.parametrize(("own", "fetches"), [(0, True), (5, True), (6, False), (8, False)])
def test_below_the_threshold_nothing_travels(own, fetches):
    """Nine blocks are more than one and a half times five, and not than six; of none they are infinitely many."""
    made = known("p0", "p1", "d0")
    made.forecast.prefixes.stored("p1", KEYS[:9])
    made.forecast.prefixes.stored("p0", KEYS[:own])
    made.forecast.placed("x", "p1", 10_000, 0, 0.0)
    assert route(made).fetch == (PrefixFetch("p1", 9) if fetches else None)


def test_what_is_quicker_computed_again_does_not_travel():
    """A slow link: the paper would wait for it."""
    made = known("p0", "p1", "d0", transfer_s=5.0)
    made.forecast.prefixes.stored("p1", KEYS[:8])
    made.forecast.placed("x", "p1", 10_000, 0, 0.0)
    assert route(made) == Route("p0", "d0")


def test_a_prompt_that_is_there_whole_still_computes_its_last_token():
    """Somebody has to make the first token."""
    made = known("p0", "d0")
    made.forecast.prefixes.stored("p0", KEYS)
    assert route(made) == Route("p0", "d0", (), 999)


def test_instances_of_one_host_share_its_cache():
    """What one stored the other loads, without a transfer."""
    made = known("p0", "p1", "d0")
    for name in ("p0", "p1"):
        made.get(name).cache = "host"
    made.forecast.prefixes.stored("host", KEYS[:4])
    made.forecast.placed("x", "p0", 100, 0, 0.0)
    assert route(made) == Route("p1", "d0", (), 400)


def test_what_an_instance_keeps_for_itself_is_found_there_and_fetched_by_nobody():
    """Live, the memory of an engine is one cache more beside that of its host, and the longer of both counts."""
    made = known("p0", "p1", "d0")
    for name in ("p0", "p1"):
        made.get(name).cache = f"host of {name}"
    made.forecast.memories.stored("p1", KEYS[:8])
    assert route(made) == Route("p1", "d0", (), 800)
    made.forecast.placed("x", "p1", 10_000, 0, 0.0)
    assert route(made) == Route("p0", "d0"), "nobody gives away what is in an engine"
    made.forecast.prefixes.stored("host of p1", KEYS[:6])
    assert route(made) == Route("p0", "d0", (), 600, PrefixFetch("host of p1", 6))
    made.forecast.memories.stored("p0", KEYS[:7])
    assert route(made) == Route("p0", "d0", (), 700)


def test_to_ask_where_a_request_would_run_changes_nothing():
    """Overload control asks before it takes a request, which then goes where it said."""
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE], "conductor")
    for name in "abcd":
        said = [made.would_place(request(name), 0.0).route for _ in range(3)]
        assert said == [made.place(request(name), 0.0).route] * 3
    assert made.would_place(request("e", prompt=10), 0.0).route.prefill == "prefill-0"


def test_one_mixed_instance_does_both_where_there_is_no_prefill_pool():
    """Its own cache counts like any other."""
    made = known("m0", "m1")
    made.forecast.prefixes.stored("m1", KEYS[:4])
    assert route(made) == Route("m1", "m1", (), 400)


def test_the_cluster_keeps_the_forecast_up_to_date():
    """What was placed waits until its first token is out, or it has ended."""
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


def test_without_predictions_it_says_so():
    """A driver forgot to give it any."""
    with pytest.raises(RuntimeError, match="was given none"):
        Conductor().route(request(), 109, pools(load("p0"), load("d0")), 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 2000)), min_size=1, max_size=6),
    st.sampled_from([None, 1.0, 1.5, 4.0]),
    st.sampled_from([0.0, 0.1, 0.5, 2.0]),
)
def test_nobody_would_have_been_quicker(instances, threshold, transfer_s):
    """The choice is the least of all that the rule allows, and says what it is going to do."""
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
        if threshold is not None and blocks < best and best > threshold * blocks:
            ways.append(max(waits, transfer_s * (best - blocks)) + (1000 - min(999, best * 100)) / 100)
        expected[name] = min(ways)
    found = route(made, threshold)
    assert found.ttft_s == pytest.approx(min(expected.values()))
    assert expected[found.prefill] == pytest.approx(found.ttft_s)
    own = instances[names.index(found.prefill)][0]
    if found.fetch is None:
        assert found.reused_tokens == min(999, own * 100)
    else:
        assert found.fetch.blocks == best > own
        assert instances[names.index(found.fetch.source)][0] == best
        assert found.reused_tokens == min(999, best * 100)
