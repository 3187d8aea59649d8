"""Routers that predict, for Prometheus: what they expect to be reused, and the queues and caches that they see."""

import time
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twofold.scheduling.forecast import Forecast
from twofold.scheduling.pools import Pools
from twofold.scheduling.route import Route
from twofold.serving.registry import Registry

OWN, FETCHED, NONE = "own", "fetched", "none"


class RouteMetrics(Collector):
    """Queues and caches are read from the forecast when they are asked for."""

    def __init__(self, registry: Registry, pools: Pools, forecast: Forecast) -> None:
        self._pools, self._forecast = pools, forecast
        self._routes = registry.counter(
            "prefill_routes",
            "Placements by what was expected to be reused: what the worker or its host had, what was fetched, nothing.",
            "reuse",
        )
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
        known = "Blocks of prompts that routers know some instance to have."
        yield GaugeMetricFamily("twofold:prefix_index_blocks", known, len(self._forecast.memories))

    def routed(self, route: Route) -> None:
        """A request was placed."""
        found = OWN if route.reused_tokens else NONE
        self._routes.labels(found if route.fetch is None else FETCHED).inc()
