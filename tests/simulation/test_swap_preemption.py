"""Swap preemption in the simulator."""

import msgspec
import pytest
from hypothesis import given, settings

from support.clusters import dump_cluster
from support.toy import CATALOG, clusters, run, workloads
from twofold.cluster.file import read_cluster
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.request import Request
from twofold.simulation.simulate import simulate

LONG = (1, 3, 20, 90, 200)  # output tokens: some take several steps
ALONE = ClusterSpec(
    pools=(PoolSpec(machines=1, machine="dgx-h100", role=Role.MIXED),),
    model="llama2-70b",
    router="jsq",
    kv_capacity_tokens=640,
    swap_space_bytes=10**10,
)


def two():
    return [Request(id=name, arrival_s=0.0, prompt_tokens=100, output_tokens=400) for name in "ab"]


@settings(max_examples=600)
@given(clusters(swapping=True), workloads(outputs=LONG))
def test_runs_end_when_blocks_run_out(cluster, requests):
    """If KV blocks run out, simulating several iterations per event gives the same results as one per event."""
    assert run(cluster, requests).facts() == run(cluster, requests, max_run=1).facts()


@settings(max_examples=600)
@given(clusters(swapping=True), workloads(outputs=LONG))
def test_every_request_ends_once_and_all_blocks_are_freed(cluster, requests):
    world = run(cluster, requests)
    counts = world.statistics
    assert counts.arrived == len(requests) == counts.completed + counts.rejected + counts.failed
    for instance in world.cluster.instances.values():
        status = instance.scheduler.status()
        assert status.idle or instance.load is None
        assert status.swap_blocks_free == status.swap_blocks_total or instance.load is None


def test_copies_take_the_time_of_the_host_link():
    """A slower host link lengthens the simulation by exactly the additional copy time."""
    slow = simulate(msgspec.structs.replace(ALONE, swap_bytes_per_s=1e9), two(), catalog=CATALOG)
    fast = simulate(msgspec.structs.replace(ALONE, swap_bytes_per_s=1e10), two(), catalog=CATALOG)
    assert slow.swaps == fast.swaps > 0
    assert slow.swap_bytes == fast.swap_bytes > 0
    assert slow.duration_s - fast.duration_s == pytest.approx(slow.swap_bytes * (1e-9 - 1e-10), abs=1e-9)
    # Each swapped block is copied out and back.
    block_bytes = 16 * CATALOG.model("llama2-70b").kv_bytes_per_token
    assert slow.swap_bytes % (2 * block_bytes) == 0


def test_default_host_link_is_pcie_per_accelerator():
    speed = 8 * CATALOG.link("pcie4").bytes_per_s
    given = simulate(msgspec.structs.replace(ALONE, swap_bytes_per_s=speed), two(), catalog=CATALOG)
    assert simulate(ALONE, two(), catalog=CATALOG).duration_s == given.duration_s


def test_swapping_runs_more_requests_at_once():
    """With swap space, two requests run together in memory that fits the full length of only one."""
    whole = simulate(msgspec.structs.replace(ALONE, swap_space_bytes=None), two(), catalog=CATALOG)
    grown = simulate(ALONE, two(), catalog=CATALOG)
    assert whole.swaps == 0
    assert (grown.ttft_s.maximum or 0) < (whole.ttft_s.maximum or 0)
    assert grown.completed == whole.completed == 2


@pytest.mark.parametrize("batcher", ["prefill", "prefill-balanced", "prefill-chunks"])
def test_prefill_batchers_run_beside_swapping_decodes(batcher):
    """Decode instances have swap space, and prefill instances have none."""
    pools = (
        PoolSpec(machines=1, machine="dgx-h100", role=Role.PREFILL, batcher=batcher),
        PoolSpec(machines=1, machine="dgx-h100", role=Role.DECODE),
    )
    spec = msgspec.structs.replace(ALONE, pools=pools)
    assert [profile.swap.blocks > 0 for profile in instance_profiles(spec, CATALOG)] == [False, True]
    assert simulate(spec, two(), catalog=CATALOG).swaps > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"router": "splitwise"}, "needs fixed roles"),
        ({"rules": "splitwise-sim"}, "needs .*the rules twofold"),
        ({"swap_space_bytes": 10}, "is less than one KV block"),
        (
            {"pools": (PoolSpec(machines=1, machine="dgx-h100", role=Role.MIXED, batcher="splitwise"),)},
            "the batcher splitwise preempts decodes",
        ),
    ],
)
def test_rejects_clusters_that_cannot_swap(change, says):
    with pytest.raises(ConfigurationError, match=says):
        simulate(msgspec.structs.replace(ALONE, **change), two(), catalog=CATALOG)


def test_rejects_a_request_larger_than_the_swap_space():
    little = msgspec.structs.replace(ALONE, swap_space_bytes=16 * 16 * CATALOG.model("llama2-70b").kv_bytes_per_token)
    assert simulate(little, two(), catalog=CATALOG).rejected == 2


def test_cluster_files_round_trip():
    """Swap settings are unchanged after writing and reading a cluster file."""
    spec = msgspec.structs.replace(ALONE, swap_bytes_per_s=2e10)
    assert read_cluster(dump_cluster(spec), "c.yaml", catalog=CATALOG) == spec
    assert "swap" not in dump_cluster(msgspec.structs.replace(ALONE, swap_space_bytes=None))
    for line in ("swap_space_bytes: 0", "swap_bytes_per_s: 0.5"):
        text = dump_cluster(msgspec.structs.replace(ALONE, swap_space_bytes=None)) + line + "\n"
        with pytest.raises(ConfigurationError, match=line.split(":", maxsplit=1)[0]):
            read_cluster(text, "c.yaml", catalog=CATALOG)
