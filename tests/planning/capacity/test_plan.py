"""KV capacity plans, compared with a simulation of every request."""

import pytest
from msgspec.structs import replace

from support.traces import ask
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.performance.registry import performance_model
from twofold.performance.reuse import reuse_s
from twofold.planning.capacity.plan import CapacityQuery, capacity_plan

BLOCK = 512


@pytest.fixture(scope="module")
def query():
    catalog = load_catalog()
    model, machine = catalog.model("llama2-70b"), catalog.machine("a100")
    return CapacityQuery(
        model=model,
        machine=machine,
        performance=performance_model("auto", model, machine, 8),
        accelerators=8,
        dram=catalog.tier("dram"),
        disk=catalog.tier("nvme"),
        nodes=4,
    )


@pytest.fixture(scope="module")
def conversations():
    """Return the requests of eleven conversations. Each request repeats all earlier blocks of its conversation."""
    requests = []
    for turn in range(6):
        for talk in range(11):
            blocks = [1000 * talk + block for block in range(4 * (turn + 1))]
            requests.append(ask(len(requests), len(requests) * 0.5, len(blocks) * BLOCK, 10, prefix_blocks=blocks))
    return requests


def counted(requests, query, caches, capacity, block_s):
    """Return the hit rate of simulated prefix caches, and the number of accelerators that the caches save."""
    stores = [PrefixCache(capacity, create_eviction("lru")) for _ in range(caches)]
    saved_s = 0.0
    for index, request in enumerate(requests):
        store, keys, prompt = stores[index % caches], request.prefix_blocks, request.prompt_tokens
        count = store.match(keys)
        store.touch(keys, count)
        store.insert(keys, start=count)
        whole_s = query.performance.prefill_s(prompt, prompt * prompt)
        part_s = reuse_s(query.performance, prompt, min(count * BLOCK, prompt - 1), count * block_s)
        saved_s += max(0.0, whole_s - part_s) if count else 0.0
    blocks = sum(len(request.prefix_blocks) for request in requests)
    hits = sum(store.hits for store in stores)
    return hits / blocks, saved_s / requests[-1].arrival_s * query.accelerators


@pytest.mark.parametrize("capacity", [8, 40, 100, 400])
def test_hits_and_savings_equal_those_of_simulated_caches(query, conversations, capacity):
    (dram, _) = capacity_plan(conversations, query).tiers
    block_gb = query.block_bytes / 1e9
    own_s = query.block_bytes / query.dram.bytes_per_s
    network_s = query.block_bytes / min(query.dram.bytes_per_s, query.machine.network_bytes_per_s)
    local = dram.local.at(capacity * block_gb)
    pool = dram.pool.at(capacity * block_gb / 4)
    for point, caches, block_s in ((local, 4, own_s), (pool, 1, own_s / 4 + network_s * 3 / 4)):
        found, free = counted(conversations, query, caches, capacity, block_s)
        assert point.hit_rate == pytest.approx(found)
        assert point.accelerators == pytest.approx(free)


def test_a_pool_hits_more_than_local_caches(query, conversations):
    (dram, _) = capacity_plan(conversations, query).tiers
    for gb in (4.0, 16.0, 64.0):
        assert dram.pool.at(gb).hit_rate >= dram.local.at(gb).hit_rate
    assert dram.pool.at(64.0).hit_rate > dram.local.at(64.0).hit_rate


def test_disk_extends_dram(query, conversations):
    dram, disk = capacity_plan(conversations, replace(query, dram_gb=2.0)).tiers
    assert disk.behind_gb == 2.0
    assert disk.pool.at(0.0).hit_rate == dram.pool.at(2.0).hit_rate
    assert disk.pool.at(0.0).accelerators == 0.0
    assert disk.pool.at(6.0).hit_rate == pytest.approx(dram.pool.at(8.0).hit_rate, abs=0.03)
    assert disk.pool.full_gb_per_node == pytest.approx(dram.pool.full_gb_per_node - 2.0, abs=0.05)


def test_disk_alone_hits_as_much_as_dram(query, conversations):
    dram, disk = (plan := capacity_plan(conversations, replace(query, dram_gb=2.0))).tiers
    alone = plan.disk_alone
    assert disk is not alone
    assert alone.pool.at(0.0).hit_rate == 0.0
    assert alone.pool.at(64.0).hit_rate == dram.pool.at(64.0).hit_rate
    without = capacity_plan(conversations, replace(query, dram_gb=0.0))
    assert without.tiers[1] is without.disk_alone


def test_a_disk_too_slow_to_read_saves_nothing(query, conversations):
    slow = replace(query, dram_gb=0.0, disk=replace(query.disk, bytes_per_s=1e3))
    (_, disk) = capacity_plan(conversations, slow).tiers
    point = disk.pool.at(64.0)
    assert point.hit_rate > 0
    assert point.accelerators == 0.0
    assert disk.pool.best().gb_per_node == 0.0


def test_a_slow_link_makes_the_pool_worth_less(query, conversations):
    quick, slow = (
        capacity_plan(conversations, replace(query, link_bytes_per_s=link)).tiers[0].pool.at(64.0)
        for link in (None, 0.1e9)
    )
    assert slow.hit_rate == quick.hit_rate
    assert slow.accelerators < quick.accelerators


def test_default_nodes_follow_from_the_prefill_load(query, conversations):
    plan = capacity_plan(conversations, replace(query, nodes=None))
    assert 8 * (plan.nodes - 1) < plan.busy <= 8 * plan.nodes
    alone = capacity_plan(conversations, replace(query, nodes=1))
    assert alone.tiers[0].pool is None
    assert alone.tiers[0].preferred is alone.tiers[0].local


def test_accepts_more_nodes_than_requests(query, conversations):
    few = conversations[:3]
    assert capacity_plan(few, replace(query, nodes=8)).tiers[0].local.at(64.0).hit_rate == 0.0


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([ask(0), ask(1, 1.0)], "block ids"),
        ([ask(n, 0.0, 600, prefix_blocks=(1,)) for n in range(2)], "all requests of this one arrive at once"),
    ],
)
def test_rejects_traces_without_blocks_or_duration(query, requests, words):
    with pytest.raises(ConfigurationError, match=words):
        capacity_plan(requests, query)
