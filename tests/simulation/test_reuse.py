"""Prefix reuse in the simulator: invariants, and times computed by hand."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import CATALOG, clusters, run
from twofold.cluster.spec import CacheSpec, ClusterSpec, InstanceFailure, PoolSpec
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.registry import performance_model
from twofold.performance.reuse import layer_wise
from twofold.request import Request
from twofold.scheduling.routers import FORECASTING_ROUTERS
from twofold.simulation.simulate import simulate

BLOCK = 512
ROUTERS = ("random", *FORECASTING_ROUTERS)
PAIR = ClusterSpec(
    pools=(
        PoolSpec(machines=2, machine="dgx-a100", role=Role.PREFILL),
        PoolSpec(machines=1, machine="dgx-a100", role=Role.DECODE),
    ),
    model="llama-3.1-70b",
    performance="roofline",
    router="conductor",
    kv_cache=CacheSpec(dram="100000 tokens"),
    contention=False,
)
MODEL = performance_model("roofline", CATALOG.model("llama-3.1-70b"), CATALOG.machine("dgx-a100"), 8)
KV_BYTES = 327_680


def prompt(name, arrival, blocks, tokens=None, output=2):
    return Request(
        id=name,
        arrival_s=arrival,
        prompt_tokens=tokens or len(blocks) * BLOCK,
        output_tokens=output,
        prefix_blocks=tuple(blocks),
    )


@st.composite
def conversations(draw, most=16):
    """Strategy for requests of a few conversations with common prefixes."""
    requests, at = [], 0
    for number in range(draw(st.integers(1, most))):
        at += draw(st.sampled_from([0, 0, 1, 50, 600, 3000]))
        talk, blocks = draw(st.integers(1, 3)), draw(st.integers(0, 6))
        keys = [0, *(talk * 100 + position for position in range(1, blocks))][:blocks]
        short = draw(st.sampled_from([0, 1, 500]))
        tokens = max(1, blocks * BLOCK - short) if blocks else 40
        requests.append(prompt(str(number), at / 1e3, keys, tokens, draw(st.sampled_from([1, 2, 20]))))
    return requests


@st.composite
def caching(draw):
    """Generate a random cluster with small prefix caches."""
    spec, batchers, model, _ = draw(clusters())
    spec = msgspec.structs.replace(
        spec,
        rules="twofold",
        router=draw(st.sampled_from(ROUTERS)),
        handoff="layer-wise",
        kv_cache=CacheSpec(
            dram=f"{draw(st.integers(1, 12)) * BLOCK} tokens",
            disk=draw(st.sampled_from([None, "2048 tokens"])),
            eviction=draw(st.sampled_from(["lru", "lfu", "length-aware"])),
        ),
    )
    roles = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
    mixed = draw(st.sampled_from(["mixed", "chunked-prefill"]))
    return spec, {role: roles.get(role, mixed) for role in batchers}, model, 20_000


@settings(max_examples=150)
@given(caching(), conversations())
def test_results_do_not_depend_on_max_run(cluster, requests):
    one, other = run(cluster, requests), run(cluster, requests, max_run=1)
    assert one.facts() == other.facts()
    assert one.cluster.reuse.result() == other.cluster.reuse.result()


@settings(max_examples=150)
@given(caching(), conversations())
def test_every_request_ends_once_and_unpins_its_blocks(cluster, requests):
    world = run(cluster, requests)
    counts, reuse = world.statistics, world.cluster.reuse
    assert counts.arrived == len(requests) == counts.completed + counts.rejected + counts.failed
    forecast = world.cluster.scheduler.pools.forecast
    keys = {key for request in requests for key in request.prefix_blocks}
    for instance in world.cluster.instances.values():
        assert instance.scheduler.status().idle or instance.load is None
        assert forecast.queue_s(instance.name, 1e9) == 0.0
    for host in reuse._hosts.values():
        assert not any(tier._holds for tier in host.cache.tiers)
        assert all(len(tier) <= tier.capacity for tier in host.cache.tiers)
        for key in keys:
            assert (key in host.cache) == (forecast.prefixes.prefix(host.name, (key,)) == 1)
    result = reuse.result()
    assert sum(result.hits.values()) + result.fetched <= result.blocks
    assert 0 <= result.reused_tokens < max(1, result.prompt_tokens)
    assert sum(result.requests.values()) == counts.arrived - counts.rejected


@settings(max_examples=100)
@given(caching(), conversations())
def test_requests_without_blocks_run_as_without_caches(cluster, requests):
    spec, *rest = cluster
    nameless = [msgspec.structs.replace(request, prefix_blocks=()) for request in requests]
    without = msgspec.structs.replace(spec, kv_cache=None)
    assert run((spec, *rest), nameless).facts() == run((without, *rest), nameless).facts()


def test_computes_only_the_missing_tokens():
    requests = [prompt("a", 0.0, range(8)), prompt("b", 100.0, range(10))]
    result = simulate(PAIR, requests, catalog=CATALOG)
    first = MODEL.prefill_s(8 * BLOCK, (8 * BLOCK) ** 2)
    rest = MODEL.prefill_s(2 * BLOCK, (10 * BLOCK) ** 2 - (8 * BLOCK) ** 2)
    loads = 8 * BLOCK * KV_BYTES / (8 * 31.5e9)
    assert result.ttft_s.high / 1e12 == pytest.approx(first, rel=1e-9)
    assert result.ttft_s.low / 1e12 == pytest.approx(layer_wise(80, loads, rest), rel=1e-9)
    assert result.reuse.reused_tokens == 8 * BLOCK
    assert result.reuse.hit_rate == pytest.approx(8 / 18)
    assert result.reuse.requests == {"prefill-0": 2, "prefill-1": 0}
    assert result.reuse.ttft_error.high == 0, "as was predicted"


def test_slow_cache_memory_delays_the_prefill():
    one = msgspec.structs.replace(PAIR.pools[0], machines=1), PAIR.pools[1]
    cache = CacheSpec(dram="100000 tokens", dram_bytes_per_s=1e9)
    slow = msgspec.structs.replace(PAIR, pools=one, kv_cache=cache)
    requests = [prompt("a", 0.0, range(8)), prompt("b", 100.0, range(8))]
    result = simulate(slow, requests, catalog=CATALOG)
    loads = 8 * BLOCK * KV_BYTES / 1e9
    rest = MODEL.prefill_s(1, (8 * BLOCK) ** 2 - (8 * BLOCK - 1) ** 2)
    first = MODEL.prefill_s(8 * BLOCK, (8 * BLOCK) ** 2)
    assert result.ttft_s.low / 1e12 == pytest.approx(first)
    assert result.ttft_s.high / 1e12 == pytest.approx(layer_wise(80, loads, rest))


def test_fetched_blocks_stay():
    burst = [prompt("first", 0.0, range(8)), *(prompt(str(i), 100.0, [*range(8), 100 + i]) for i in range(2))]
    later = [*burst, prompt("later", 200.0, [*range(8), 300])]
    result = simulate(PAIR, later, catalog=CATALOG)
    reuse = result.reuse
    assert reuse.fetched == 8
    assert reuse.requests == {"prefill-0": 2, "prefill-1": 2}
    assert sum(reuse.hits.values()) == 16, "one in the burst and the later one"
    assert [(block.uses, block.caches) for block in reuse.hottest[:8]] == [(4, 2)] * 8
    alone = msgspec.structs.replace(PAIR, router="local-prefix")
    assert simulate(alone, later, catalog=CATALOG).reuse.fetched == 0


def test_fetches_the_output_of_a_turn_from_the_decode_instance():
    first = Request(id="0", arrival_s=0.0, prompt_tokens=8 * BLOCK, output_tokens=2 * BLOCK + 1, session="s")
    next_turn = msgspec.structs.replace(first, id="1", prompt_tokens=11 * BLOCK, output_tokens=2)
    reuse = simulate(PAIR, [first, next_turn], catalog=CATALOG).reuse
    assert reuse.fetched == 2
    assert reuse.reused_tokens == 10 * BLOCK
    assert sum(reuse.hits.values()) == 8, "on the instance with the prompt"
    assert reuse.caches == 2


def test_survives_a_failed_source():
    slow = msgspec.structs.replace(PAIR, link_bytes_per_s=1e10, router="conductor")
    burst = [prompt("first", 0.0, range(8)), *(prompt(str(i), 100.0, range(8)) for i in range(4))]
    for name in ("prefill-0", "prefill-1"):
        failing = msgspec.structs.replace(slow, failures=(InstanceFailure(instance=name, at_s=100.05, back_s=110.0),))
        result = simulate(failing, burst, catalog=CATALOG)
        assert result.completed + result.failed == 5
        assert result.unfinished == 0


def test_fetches_from_disk_take_longer():
    cache = CacheSpec(dram=f"{8 * BLOCK} tokens", disk="1000000 tokens", disk_bytes_per_s=1e9)
    spec = msgspec.structs.replace(
        PAIR, kv_cache=cache, pools=(msgspec.structs.replace(PAIR.pools[0], machines=1), PAIR.pools[1])
    )
    requests = [prompt("a", 0.0, range(8)), prompt("b", 100.0, range(10, 18)), prompt("a2", 200.0, range(8))]
    result = simulate(spec, requests, catalog=CATALOG)
    assert result.reuse.hits == {"dram": 0, "disk": 8}
    assert result.ttft_s.high / 1e12 == pytest.approx(8 * BLOCK * KV_BYTES / 1e9, rel=0.01)


def test_instances_share_the_cache_of_their_machine():
    two = msgspec.structs.replace(PAIR.pools[0], machines=1, tensor_parallel=4)
    spec = msgspec.structs.replace(PAIR, pools=(two, PAIR.pools[1]))
    burst = [prompt("first", 0.0, range(8)), *(prompt(str(i), 100.0, range(8)) for i in range(2))]
    reuse = simulate(spec, burst, catalog=CATALOG).reuse
    assert reuse.caches == 1
    assert reuse.fetched == 0
    assert reuse.requests == {"prefill-0": 2, "prefill-1": 1}
    assert sum(reuse.hits.values()) == 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rules": "splitwise-sim"}, "needs .*the rules twofold"),
        ({"kv_cache": CacheSpec(dram="511 tokens")}, "no room for a block of 512 tokens"),
        ({"kv_cache": CacheSpec(dram="1GiB", disk="1kB")}, "disk of 1kB has no room"),
        (
            {
                "pools": (
                    PoolSpec(machines=1, machine="dgx-a100", role=Role.MIXED, pipeline_parallel=2, tensor_parallel=4),
                )
            },
            "set pipeline_parallel 1",
        ),
    ],
)
def test_rejects_unsupported_caches(changes, reason):
    spec = msgspec.structs.replace(PAIR, **changes)
    with pytest.raises(ConfigurationError, match=reason):
        simulate(spec, [prompt("a", 0.0, range(2))], catalog=CATALOG)


@pytest.mark.parametrize("router", FORECASTING_ROUTERS)
def test_forecasting_routers_work_without_caches(router):
    spec = msgspec.structs.replace(PAIR, router=router, kv_cache=None)
    result = simulate(spec, [prompt(str(i), i / 10, range(8)) for i in range(20)], catalog=CATALOG)
    assert result.completed == 20
    assert result.reuse is None
