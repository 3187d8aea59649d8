"""Metrics of the KV stores of hosts."""

from prometheus_client import generate_latest

from twofold.serving.messages import StoreStatus, StoreTier
from twofold.serving.telemetry.metrics import MetricRegistry, StoreMetrics


def status(epoch, hits, stored):
    tier = StoreTier(capacity=10, blocks=4, hits=hits, removals={"capacity": hits})
    return StoreStatus(host="", epoch=epoch, tiers={"memory": tier}, bytes_moved={"stored": stored})


def test_counters_span_store_restarts():
    registry = MetricRegistry()
    metrics = StoreMetrics(registry)
    for told in (status(1, 2, 100), status(1, 5, 300), status(2, 1, 50)):
        metrics.status(told)
    text = generate_latest(registry.collectors).decode()
    assert 'twofold:kv_store_hits_total{host="home",tier="memory"} 6.0' in text
    assert 'twofold:kv_store_removals_total{host="home",reason="capacity",tier="memory"} 6.0' in text
    assert 'twofold:kv_store_bytes_total{host="home",way="stored"} 350.0' in text
    assert 'twofold:kv_store_blocks{host="home",tier="memory"} 4.0' in text
    assert 'twofold:kv_store_capacity_blocks{host="home",tier="memory"} 10.0' in text
