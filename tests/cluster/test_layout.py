"""Placement of pipeline stages on machines, and division of CPU cores among workers and gateway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.cluster.layout import gateway_cores, layout_of, share_cores
from twofold.cluster.paths import transfer_model
from twofold.cluster.profiles import instance_profiles, instance_slots, machines_of
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role

CATALOG = load_catalog()
A100 = CATALOG.machine("dgx-a100")


def pool(machines, parallel=8, stages=1, role=Role.MIXED, **more):
    return PoolSpec(
        machines=machines, machine="dgx-a100", role=role, tensor_parallel=parallel, pipeline_parallel=stages, **more
    )


def on(spec):
    """Return the indices of the machines of each instance in a pool."""
    layout = layout_of(spec, A100)
    return [list(layout.machines_of(number)) for number in range(layout.instances)]


def cluster(*pools, **more):
    return ClusterSpec(pools=pools, model="opt-66b", router="jsq", **more)


@pytest.mark.parametrize(
    ("spec", "machines"),
    [
        (pool(2), [[0], [1]]),
        (pool(2, 4), [[0], [0], [1], [1]]),
        (pool(2, 8, 2), [[0, 1]]),
        (pool(1, 2, 4), [[0]]),
        (pool(1, 2, 2), [[0], [0]]),
        (pool(2, 2, 3), [[0], [1]]),  # eight stages fit, but instances do not span machines if avoidable
        (pool(4, 2, 4, instances=2), [[0, 1], [2, 3]]),
        (pool(2, 2, 2, instances=1), [[0, 1]]),
        (pool(3, 8, 1, instances=2), [[0], [1]]),
        (pool(2, 2, instances=4, expert_parallel=4), [[0], [0], [1], [1]]),
        (pool(3, 2, instances=4, expert_parallel=8), [[0], [0], [0], [0]]),
    ],
)
def test_instances_fill_machines_in_order(spec, machines):
    assert on(spec) == machines


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 12), st.integers(1, 60) | st.none())
def test_every_layout_fits(machines, parallel, stages, instances):
    try:
        layout = layout_of(pool(machines, parallel, stages, instances=instances), A100)
    except ConfigurationError:  # too many instances for the machines
        return
    assert layout.accelerators <= A100.count
    where = [layout.machines_of(number) for number in range(layout.instances)]
    assert all(each.start >= 0 and each.stop <= machines for each in where)
    assert layout.spans == any(len(each) > 1 for each in where)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([pool(1, 8, 2)], "1 dgx-a100 cannot hold 1 instances of 2 stages of 8 accelerators: at most 0"),
        ([pool(2, 8, 1, instances=3)], "2 dgx-a100 cannot hold 3 instances"),
        ([pool(2, 8, 1, instances=0)], "at least one instance, not 0"),
        ([pool(1, 8, 0)], "pipeline parallelism must be at least 1, not 0"),
        ([pool(1, nodes="a b")], "invalid nodes name 'a b'"),
        ([pool(1, nodes="a"), pool(1, nodes="a")], "use 16 accelerators of a dgx-a100, which has 8"),
        ([pool(1, 2, nodes="a"), pool(2, 2, nodes="a")], "need equal machines"),
    ],
)
def test_rejects_layouts_that_do_not_fit(pools, message):
    with pytest.raises(ConfigurationError, match=message):
        instance_profiles(cluster(*pools), CATALOG)


def test_pools_on_shared_nodes_count_the_machine_once():
    """Pools with the same `nodes` name share machines."""
    spec = cluster(
        pool(1, 4, 1, Role.PREFILL, instances=1, nodes="here"), pool(1, 2, 1, Role.DECODE, instances=1, nodes="here")
    )
    kinds = instance_profiles(spec, CATALOG)
    assert [(seat.name, seat.machine) for seat in instance_slots(kinds)] == [
        ("prefill-0", "nodes-here/0"),
        ("decode-0", "nodes-here/0"),
    ]
    assert [(machine.name, count) for machine, count in machines_of(kinds)] == [("dgx-a100", 1)]


def test_pipelines_share_the_same_machines():
    spec = cluster(
        pool(2, 4, 2, Role.PREFILL, instances=1, nodes="pair"), pool(2, 2, 2, Role.DECODE, instances=1, nodes="pair")
    )
    assert {seat.machine for seat in instance_slots(instance_profiles(spec, CATALOG))} == {"nodes-pair/0+nodes-pair/1"}


def test_pipeline_bandwidth_is_the_sum_over_its_machines():
    """A pipeline on two machines transfers KV at twice the bandwidth of one machine."""
    model = CATALOG.model("opt-66b")
    spec = cluster(pool(2, 8, 2))
    (kind,) = instance_profiles(spec, CATALOG)
    assert transfer_model(spec, model, kind).bytes_per_s == 2 * A100.network_bytes_per_s
    slow = cluster(pool(2, 8, 2), link_bytes_per_s=1e9)
    assert transfer_model(slow, model, kind).bytes_per_s == 2e9


def test_workers_share_cores_evenly_or_take_turns():
    assert share_cores([0, 1, 2, 3], 2) == [(0, 1), (2, 3)]
    assert share_cores([0, 1, 2], 2) == [(0,), (1,)]
    # If there are more workers than cores, they take cores in order, then in reverse order, and so on.
    assert share_cores([0, 1], 3) == [(0,), (1,), (1,)]
    assert share_cores([4, 6], 5) == [(4,), (6,), (6,), (4,), (4,)]


def test_gateway_avoids_the_cores_of_decode_workers():
    """The gateway runs only on cores without decode workers, or on all cores if every core has a decode worker."""
    split = [(Role.PREFILL, (0,)), (Role.DECODE, (1,))]
    assert gateway_cores([0, 1], split) == (0,)
    assert gateway_cores([0, 1], [(Role.MIXED, (0,)), (Role.MIXED, (1,))]) == (0, 1)
    assert gateway_cores([0, 1], [(Role.PREFILL, ()), (Role.DECODE, ())]) == (0, 1)
