"""Predicted queueing and prefill times that routers use in a live service."""

from math import inf

import pytest

from support.measured import link, registered
from support.routed import load, pools, predicted, request
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.performance.transfer import PrefillSpeed
from twofold.route import PrefixFetch
from twofold.scheduling.routers.forecasting import Conductor
from twofold.serving.config import ForecastConfig
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.messages import BlocksChanged, StoreChanged, StoreFetch

BLOCK = 16
KEYS = tuple(bytes([number]) * 16 for number in range(8))
SPEED = PrefillSpeed(fixed_s=0.01, s_per_token=1e-3)


class World:
    """A forecast of prefill times for a live service with the given workers."""

    def __init__(self, config=ForecastConfig(), **workers):  # noqa: B008  (it is frozen)
        self.paths = MeasuredPaths()
        self.live = LiveForecast(config, BLOCK, self.paths)
        self.pools = pools(*map(load, workers))
        self.pools.forecast = self.live.forecast
        # A name's first letter is the worker's role.
        for name, host in workers.items():
            self.paths.registered(registered(name, SPEED if name[0] == "p" else None, host))
            self.live.joined(self.pools.get(name), host)

    def blocks(self, instance, stored=(), removed=()):
        self.live.blocks_changed(BlocksChanged(instance=instance, epoch=1, stored=list(stored), removed=list(removed)))

    def store(self, host, stored=(), address=None, epoch=1):
        changed = StoreChanged(host=host, epoch=epoch, stored=list(stored), removed=[], address=address)
        self.live.stores.changed(changed)

    def busy(self, instance):
        self.live.forecast.placed(f"on {instance}", instance, 10_000, 0, 0.0)

    def route(self):
        return Conductor().route(request(prompt=200, blocks=KEYS), 210, self.pools, 0.0)


def test_a_prompt_is_routed_to_the_worker_with_its_prefix():
    world = World(p0="", p1="", d0="")
    assert world.route() == predicted("p0", "d0")
    world.blocks("p1", stored=KEYS)
    found = world.route()
    assert found == predicted("p1", "d0", 8 * BLOCK)
    assert found.ttft_s == pytest.approx(SPEED.seconds(200 - 8 * BLOCK))
    world.blocks("p1", removed=KEYS[2:])
    assert world.route() == predicted("p1", "d0", 2 * BLOCK)
    world.live.lost("p1")
    assert world.route() == predicted("p0", "d0")


def test_workers_share_the_prefixes_of_their_hosts_store():
    """A worker reuses the longer of two prefixes: the one in its engine and the one in its host's KV store."""
    world = World(p0="", p1="", d0="")
    world.store("", KEYS[:4])
    world.blocks("p0", stored=KEYS[:2])
    world.busy("p0")
    assert world.route() == predicted("p1", "d0", 4 * BLOCK)
    world.blocks("p1", stored=KEYS[:6])
    assert world.route() == predicted("p1", "d0", 6 * BLOCK)


def test_a_prefix_is_fetched_from_another_hosts_store():
    world = World(p0="", p1="far", d0="")
    world.store("far", KEYS, address="tcp://far:1")
    world.busy("p1")
    assert world.route() == predicted("p0", "d0"), "no store can receive them yet"
    world.store("", address="tcp://here:1")
    found = world.route()
    assert found == predicted("p0", "d0", 8 * BLOCK, PrefixFetch("far", 8))
    assert world.live.fetch_of(found) == StoreFetch(host="far", address="tcp://far:1", blocks=8)
    assert world.live.fetch_of(predicted("p0", "d0")) is None
    world.store("far", KEYS, epoch=2)  # without an address
    assert world.live.fetch_of(found) is None
    world.live.stores.lost("far")
    assert world.route() == predicted("p0", "d0")


def test_fetch_times_use_the_slowest_link_to_the_host():
    world = World(p0="", p1="far", d0="")
    expected = world.live.forecast.prediction("p0")
    assert expected.transfer_s(1000) == inf
    world.store("", address="tcp://here:1")
    world.store("far", KEYS, address="tcp://far:1")
    world.busy("p1")
    world.paths.measured(link("p1", "d0", bytes_per_s=4e7))
    assert expected.transfer_s(1000) == pytest.approx(0.101)
    assert world.route().fetch is not None
    world.paths.measured(link("p1", "d0", bytes_per_s=4e6))
    assert world.route() == predicted("p0", "d0")


def test_a_restarted_worker_has_an_empty_queue_and_cache():
    world = World(p0="", d0="")
    world.busy("p0")
    world.blocks("p0", stored=KEYS)
    world.live.lost("p0")
    world.live.joined(world.pools.get("p0"), "")
    assert world.live.forecast.queue_s("p0", 0.0) == 0.0
    assert world.route() == predicted("p0", "d0")


def test_prefill_times_come_from_the_cluster_spec():
    spec = ClusterSpec(
        pools=(
            PoolSpec(machines=1, machine="h100", role=Role.PREFILL),
            PoolSpec(machines=1, machine="h100", role=Role.DECODE),
        ),
        model="llama2-70b",
    )
    world = World(ForecastConfig(cluster=spec), p0="")
    # A worker that is not in the spec has the performance model of the spec's first pool.
    model = instance_profiles(spec, load_catalog())[0].model
    assert world.live.forecast.prediction("p0").prefill_s(1000) == model.prefill_s(1000, 1000 * 1000)
    assert world.live.forecast.prediction("p0").prefill_s(1000, 600) == model.prefill_s(400, 640_000)
