"""Metrics of routers that predict TTFT."""

from prometheus_client import generate_latest

from support.predicted import forecast
from support.routed import load, pools
from twofold.events import Route
from twofold.route import PrefixFetch
from twofold.serving.telemetry.metrics import MetricRegistry, RouteMetrics


def test_routes_by_reuse_and_queues_by_instance():
    registry, known = MetricRegistry(), forecast("p0", "p1", "d0")
    metrics = RouteMetrics(registry, pools(*map(load, ("p0", "p1", "d0"))), known)
    known.memories.stored("p1", [1, 2, 3])
    known.placed("a", "p1", 100_000_000_000, 0, 0.0)
    for route in (
        Route("p0", "d0"),
        Route("p0", "d0", (), 5),
        Route("p0", "d0", (), 5),
        Route("p0", "d0", (), 5, PrefixFetch("far", 1)),
    ):
        metrics.routed(route)
    text = generate_latest(registry.collectors).decode()
    for line in (
        'twofold:prefill_routes_total{reuse="own"} 2.0',
        'twofold:prefill_routes_total{reuse="fetched"} 1.0',
        'twofold:prefill_routes_total{reuse="none"} 1.0',
        'twofold:prefill_queue_seconds{instance="p0"} 0.0',
        "twofold:prefix_index_blocks 3.0",
    ):
        assert line in text.splitlines()
    assert 'twofold:prefill_queue_seconds{instance="p1"}' in text
    assert 'instance="d0"' not in text
