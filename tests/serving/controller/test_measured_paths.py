"""Measured speeds of KV links and of prefills."""

import asyncio

import msgspec

from support.measured import link, registered
from twofold.engine.base import KvLayout, LayerShape
from twofold.kvcache.sharding import Sharding
from twofold.performance.transfer import PrefillSpeed
from twofold.serving.controller.forecast import NEVER, UNKNOWN_BYTES_PER_S, UNKNOWN_TOKENS, MeasuredPaths
from twofold.serving.telemetry.metrics import LinkMetrics, MetricRegistry


def measured(*links):
    paths = MeasuredPaths()
    paths.registered(registered("p0", PrefillSpeed(fixed_s=0.0, s_per_token=1e-4)))
    for each in links:
        paths.measured(each)
    return paths


def test_unmeasured_links_have_no_transfer_model():
    paths = MeasuredPaths()
    assert paths.crossover("p0") == UNKNOWN_TOKENS
    assert paths.transfer("p0", "d0") is None
    assert paths.summary() == ""
    paths.measured(link("p0", "d0"))
    assert paths.transfer("p0", "d0") is None, "its prefill speed is unknown"


def test_the_crossover_follows_from_link_and_prefill_speed():
    paths = measured(link("p0", "d0"))
    assert paths.transfer("p0", "d0").kv_bytes_per_token == 4000
    # Layer-wise transfer hides 4 of 5 layers, but adds 4 transfer latencies.
    assert paths.crossover("p0") in {1250, 1251}
    paths.measured(link("p0", "d1", bytes_per_s=1e8))
    assert paths.crossover("p0") in {125, 126}, "the slower link decides"
    assert "0.1 GB/s and 1 ms per transfer" in paths.summary()
    assert "layer-wise KV transfer from 12" in paths.summary()


def test_layer_wise_transfer_never_pays_on_a_high_overhead_link():
    paths = measured(link("p0", "d0", overhead_s=10.0, bytes_per_s=1e15))
    assert paths.crossover("p0") == NEVER
    assert "no layer-wise KV transfer" in paths.summary()


def test_an_unmeasured_worker_uses_the_slowest_measured_speed():
    paths = measured(link("p0", "d0"))
    paths.registered(registered("p1"))
    assert paths.prefill_s("p1", 1000) == paths.prefill_s("p0", 1000) == 0.1


def test_readiness_waits_for_required_links_only():
    paths = measured()

    async def run():
        waiting = asyncio.create_task(paths.known([("p0", "d0"), ("p0", "d1")]))
        for target in ("d2", "d0", "d1"):
            await asyncio.sleep(0)
            assert not waiting.done()
            paths.measured(link("p0", target))
        await asyncio.wait_for(waiting, 60)

    asyncio.run(run())


def test_the_path_into_a_host_is_its_slowest_crossing_link():
    """KV transfer into a host is predicted at the speed of the host's slowest link to another host."""
    paths = MeasuredPaths()
    assert paths.into("far") is None
    paths.registered(registered("p0", PrefillSpeed(fixed_s=0.0, s_per_token=1e-4)))
    assert paths.into("far").serialized_s(1000) == 4000 * 1000 / UNKNOWN_BYTES_PER_S
    for name in ("p1", "d1"):
        paths.registered(registered(name, host="far"))
    paths.registered(registered("d2", host="third"))
    paths.measured(link("p0", "d1", bytes_per_s=1e8))
    paths.measured(link("p1", "d2", bytes_per_s=1e7))
    paths.measured(link("p1", "d1", bytes_per_s=1e6))
    assert [paths.into(host).bytes_per_s for host in ("", "far", "third")] == [1e8, 1e7, 1e7]


def test_measurements_are_exposed_as_metrics():
    registry = MetricRegistry()
    seen = link("p0", "d0")
    LinkMetrics(registry).show(seen, measured(seen))
    value = registry.collectors.get_sample_value
    labels = {"source": "p0", "target": "d0"}
    assert value("twofold:kv_link_bytes_per_second", labels) == 1e9
    assert value("twofold:kv_link_overhead_seconds", labels) == 0.001
    assert value("twofold:prefill_seconds_per_token", {"instance": "p0"}) == 1e-4
    assert value("twofold:handoff_crossover_tokens", {"instance": "p0"}) in {1250, 1251}


def test_the_crossover_is_updated_by_new_measurements():
    registry, paths = MetricRegistry(), measured(link("p1", "d0"))
    metrics = LinkMetrics(registry)

    def shown(seen):
        paths.measured(seen)
        metrics.show(seen, paths)
        value = registry.collectors.get_sample_value("twofold:handoff_crossover_tokens", {"instance": "p0"})
        assert value == paths.crossover("p0")
        return value

    fast = shown(link("p0", "d0"))
    slow = shown(link("p0", "d1", bytes_per_s=1e8))
    assert slow < fast
    assert shown(link("p0", "d1")) == fast == paths.crossover("p1")


def test_ranks_transfer_in_parallel():
    layout = KvLayout(layers=(LayerShape(2, 50, 50),) * 5, block_size=16, dtype="float32", itemsize=4)

    def path(source, target):
        paths = MeasuredPaths()
        for name, split in (("p0", source), ("d0", target)):
            message = registered(name, PrefillSpeed(fixed_s=0.0, s_per_token=1e-4))
            memory = msgspec.structs.replace(message.peer.memory, layout=layout, sharding=split)
            paths.registered(
                msgspec.structs.replace(message, peer=msgspec.structs.replace(message.peer, memory=memory))
            )
        paths.measured(link("p0", "d0"))
        found = paths.transfer("p0", "d0")
        return found.kv_bytes_per_token, found.latency_s

    assert path(Sharding(1, 1), Sharding(1, 1)) == (4000, 0.001)
    assert path(Sharding(2, 1), Sharding(1, 1)) == (2000, 0.001)
    assert path(Sharding(1, 1), Sharding(2, 1)) == (4000, 0.002)
    assert path(Sharding(1, 2), Sharding(1, 1)) == (4000, 0.001)
