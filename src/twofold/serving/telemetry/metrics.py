"""Prometheus metrics of a service, with the prefix `twofold:`. Metrics that vLLM 0.32 also has keep vLLM's names."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from twofold.events import Route
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.ledger import OverloadLedger
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pools
from twofold.serving.controller.forecast import MeasuredPaths
from twofold.serving.messages import LinkMeasured, StoreStatus, StoreTier

PREFIX = "twofold:"
ANONYMOUS = "anonymous"  # requests without an API key
ERROR_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
OWN, FETCHED, NONE = "own", "fetched", "none"
_OWN_HOST = "home"
_NO_TIER = StoreTier(capacity=0, blocks=0, hits=0, removals={})


class MetricRegistry:
    """Prometheus metrics of one service, created with the prefix `twofold:`."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> "BulkHistogram":
        histogram = BulkHistogram(PREFIX + name, text, buckets)
        self.collectors.register(histogram)
        return histogram

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.collectors)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.collectors)


class BulkHistogram(Collector):
    """Histogram that takes many values at once: prometheus_client's takes a lock for each."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        places = np.searchsorted(self._buckets, values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        names = map(floatToGoString, (*self._buckets, inf))
        histogram = HistogramMetricFamily(self._name, self._text)
        histogram.add_metric((), list(zip(names, np.cumsum(self._counts).tolist(), strict=True)), self._sum)
        yield histogram


class AdmissionMetrics(Collector):
    """Metrics of waiting and running requests per API key."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "twofold:admission_requests", "Requests by API key and state.", labels=("key", "state")
        )
        for key, (waiting, running) in self._admission.by_key().items():
            requests.add_metric((key or ANONYMOUS, "waiting"), waiting)
            requests.add_metric((key or ANONYMOUS, "running"), running)
        yield requests


class LinkMetrics:
    """Metrics of KV links and prefills: measured speeds, and the prompt length above which hand-offs are layer-wise."""

    def __init__(self, registry: MetricRegistry) -> None:
        gauge = registry.gauge
        self._bytes = gauge("kv_link_bytes_per_second", "Measured bandwidth of a KV link.", "source", "target")
        self._overhead = gauge("kv_link_overhead_seconds", "Measured overhead of a KV transfer.", "source", "target")
        self._prefill = gauge("prefill_seconds_per_token", "Measured prefill time per prompt token.", "instance")
        self._crossover = gauge(
            "handoff_crossover_tokens", "Prompt length above which KV transfer is layer-wise.", "instance"
        )

    def show(self, message: LinkMeasured, paths: MeasuredPaths) -> None:
        """Record the measured speed of a link, and the prefill speed of its source instance."""
        source = message.source
        self._bytes.labels(source, message.target).set(message.speed.bytes_per_s)
        self._overhead.labels(source, message.target).set(message.speed.overhead_s)
        self._crossover.labels(source).set_function(partial(paths.crossover, source))
        speed = paths.prefills.get(source)
        if speed is not None:
            self._prefill.labels(source).set(speed.s_per_token)


class OverloadMetrics(Collector):
    """Metrics of overload control: load of prefill and decode, and errors of predicted TTFTs."""

    def __init__(self, registry: MetricRegistry, ledger: OverloadLedger) -> None:
        self._ledger = ledger
        self._errors = registry.histogram(
            "ttft_prediction_error_ratio", "Relative error of predicted TTFTs.", ERROR_BUCKETS
        )
        registry.collectors.register(self)

    def collect(self) -> Iterator[Metric]:
        load = GaugeMetricFamily("twofold:load", "Predicted latency over its SLO bound, by phase.", labels=("phase",))
        for phase, value in zip(("prefill", "decode"), self._ledger.loads(time.monotonic()), strict=True):
            load.add_metric((phase,), value)
        yield load

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """Record the relative error of a predicted TTFT. The measured TTFT is `real_s`."""
        if real_s > 0.0:
            self._errors.observe([abs(predicted_s - real_s) / real_s])


class RouteMetrics(Collector):
    """Metrics of prediction-based routing: prefix reuse, queueing times, and size of the prefix index."""

    def __init__(self, registry: MetricRegistry, pools: Pools, forecast: ClusterForecast) -> None:
        self._pools, self._forecast = pools, forecast
        self._routes = registry.counter("prefill_routes", "Placements by the expected source of prefix reuse.", "reuse")
        for reuse in (OWN, FETCHED, NONE):
            self._routes.labels(reuse)
        registry.collectors.register(self)

    def collect(self) -> Iterator[Metric]:
        queues = GaugeMetricFamily(
            "twofold:prefill_queue_seconds", "Predicted time until an instance is idle.", labels=("instance",)
        )
        now = time.monotonic()
        for load in self._pools:
            if load.role.prefills:
                queues.add_metric((load.id,), self._forecast.queue_s(load.id, now))
        yield queues
        blocks = "Prefix blocks in engine memory that the router knows of."
        yield GaugeMetricFamily("twofold:prefix_index_blocks", blocks, len(self._forecast.memories))

    def routed(self, route: Route) -> None:
        """Count a placed request by the source of its cached prefix: own cache, remote cache or none."""
        found = OWN if route.reused_tokens else NONE
        self._routes.labels(found if route.fetch is None else FETCHED).inc()


class StoreMetrics:
    """Metrics of the hosts' KV stores (KV blocks in DRAM and on disk): blocks, hits, removals and bytes moved."""

    def __init__(self, registry: MetricRegistry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._blocks = gauge("kv_store_blocks", "KV blocks in a host store.", "host", "tier")
        self._capacity = gauge("kv_store_capacity_blocks", "Capacity of a host store in KV blocks.", "host", "tier")
        self._hits = counter("kv_store_hits", "KV blocks of a store reused by prompts.", "host", "tier")
        self._removals = counter(
            "kv_store_removals", "KV blocks removed from a store by reason.", "host", "tier", "reason"
        )
        self._moved = counter(
            "kv_store_bytes",
            "Bytes moved between a host store and workers, disk and other hosts, by direction.",
            "host",
            "way",
        )
        self._last: dict[str, StoreStatus] = {}

    def status(self, status: StoreStatus) -> None:
        """Record the status report of a KV store."""
        host, before = status.host or _OWN_HOST, self._last.get(status.host)
        if before is None or before.epoch != status.epoch:
            # Counters restart at 0 with the store.
            before = StoreStatus(host=status.host, epoch=status.epoch, tiers={}, bytes_moved={})
        self._last[status.host] = status
        for name, tier in status.tiers.items():
            counted = before.tiers.get(name, _NO_TIER)
            self._blocks.labels(host, name).set(tier.blocks)
            self._capacity.labels(host, name).set(tier.capacity)
            self._hits.labels(host, name).inc(tier.hits - counted.hits)
            for reason, count in tier.removals.items():
                self._removals.labels(host, name, reason).inc(count - counted.removals.get(reason, 0))
        for way, count in status.bytes_moved.items():
            self._moved.labels(host, way).inc(count - before.bytes_moved.get(way, 0))
