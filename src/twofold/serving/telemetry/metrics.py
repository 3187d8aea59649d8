"""Who is at the door, for Prometheus: read from the admission when it is asked for.

Metrics of what workers measured when they met: links, prefill, and what follows for hand-offs.

Overload control, for Prometheus: the loads that it goes by, and how near its predictions come.

Routers that predict, for Prometheus: what they expect to be reused, and the queues and caches that they see.

Metrics of the stores of hosts: what they say of themselves.

Prometheus metrics of the service. Names follow vLLM's where they mean the same, with our prefix.

The same as vLLM's, as of its release 0.32: time_to_first_token_seconds, inter_token_latency_seconds,
request_time_per_output_token_seconds, e2e_request_latency_seconds, request_queue_time_seconds,
request_prefill_time_seconds, request_decode_time_seconds, request_prompt_tokens, request_generation_tokens,
request_success_total, prompt_tokens_total, generation_tokens_total, admission_rejections_total,
num_requests_running, num_requests_waiting, kv_cache_usage_perc.
"""

import time
from collections.abc import Iterator
from functools import partial

from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.ledger import OverloadLedger
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.router import Route
from twofold.scheduling.replan.replanner import ReplanOutcome
from twofold.serving.controller.forecast import MeasuredPaths
from twofold.serving.messages import HandoffReport, LinkMeasured, StoreStatus, StoreTier
from twofold.serving.telemetry.request_metrics import InstanceMetrics, MetricRegistry, RequestMetrics
from twofold.serving.telemetry.snapshot import AttemptStage
from twofold.slo import Slo

ANONYMOUS = "anonymous"  # requests without a key, where none is asked for


class AdmissionMetrics(Collector):
    """Requests by API key, which is told by its name."""

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
    """What hand-off policies go by."""

    def __init__(self, registry: MetricRegistry) -> None:
        gauge = registry.gauge
        self._bytes = gauge("kv_link_bytes_per_second", "What a link carries, measured.", "source", "target")
        self._overhead = gauge(
            "kv_link_overhead_seconds", "What each transfer over a link costs.", "source", "target"
        )
        self._prefill = gauge(
            "prefill_seconds_per_token", "Time of a prefill per token, measured.", "instance"
        )
        self._crossover = gauge(
            "handoff_crossover_tokens", "Prompt length from which KV pays to be sent by layer.", "instance"
        )

    def show(self, message: LinkMeasured, paths: MeasuredPaths) -> None:
        """A link was measured. What follows from all links of its source is computed when somebody looks."""
        source = message.source
        self._bytes.labels(source, message.target).set(message.speed.bytes_per_s)
        self._overhead.labels(source, message.target).set(message.speed.overhead_s)
        self._crossover.labels(source).set_function(partial(paths.crossover, source))
        speed = paths.prefills.get(source)
        if speed is not None:
            self._prefill.labels(source).set(speed.s_per_token)


ERROR_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


class OverloadMetrics(Collector):
    """Loads are read from the ledger when they are asked for."""

    def __init__(self, registry: MetricRegistry, ledger: OverloadLedger) -> None:
        self._ledger = ledger
        self._errors = registry.histogram(
            "ttft_prediction_error_ratio",
            "How far a predicted time to the first token was from the real one, over the real one.",
            ERROR_BUCKETS,
        )
        registry.collectors.register(self)

    def collect(self) -> Iterator[Metric]:
        load = GaugeMetricFamily(
            "twofold:load", "Predicted latency over its bound in the SLO, by phase.", labels=("phase",)
        )
        for phase, value in zip(("prefill", "decode"), self._ledger.loads(time.monotonic()), strict=True):
            load.add_metric((phase,), value)
        yield load

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """The TTFT of a request was predicted, and is known now."""
        if real_s > 0.0:
            self._errors.observe(abs(predicted_s - real_s) / real_s)


OWN, FETCHED, NONE = "own", "fetched", "none"


class RouteMetrics(Collector):
    """Queues and caches are read from the forecast when they are asked for."""

    def __init__(self, registry: MetricRegistry, pools: Pools, forecast: ClusterForecast) -> None:
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


_OWN_HOST = "home"  # what the service's own host is called here


class StoreMetrics:
    """Blocks, hits and evictions of each tier, and the bytes that went each way."""

    def __init__(self, registry: MetricRegistry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._blocks = gauge("kv_store_blocks", "KV blocks in the store of a host.", "host", "tier")
        self._capacity = gauge("kv_store_capacity_blocks", "KV blocks that it has room for.", "host", "tier")
        self._hits = counter("kv_store_hits", "KV blocks of a store that prompts used.", "host", "tier")
        self._removals = counter(
            "kv_store_removals",
            "KV blocks that went from a tier of a store, by why.",
            "host",
            "tier",
            "reason",
        )
        self._moved = counter(
            "kv_store_bytes",
            "Bytes loaded from a store by workers, stored in it, read from its disk and written to it, brought from "
            "the stores of other hosts and sent to those.",
            "host",
            "way",
        )
        self._last: dict[str, StoreStatus] = {}

    def status(self, status: StoreStatus) -> None:
        """The accounts of a store since its life began: another life begins at nothing."""
        host, before = status.host or _OWN_HOST, self._last.get(status.host)
        if before is not None and before.epoch != status.epoch:
            before = None
        self._last[status.host] = status
        for name, tier in status.tiers.items():
            self._tier(host, name, tier, None if before is None else before.tiers.get(name))
        for way, count in status.bytes_moved.items():
            self._moved.labels(host, way).inc(
                count - (0 if before is None else before.bytes_moved.get(way, 0))
            )

    def _tier(self, host: str, name: str, tier: StoreTier, before: StoreTier | None) -> None:
        self._blocks.labels(host, name).set(tier.blocks)
        self._capacity.labels(host, name).set(tier.capacity)
        self._hits.labels(host, name).inc(tier.hits - (0 if before is None else before.hits))
        for reason, count in tier.removals.items():
            self._removals.labels(host, name, reason).inc(
                count - (0 if before is None else before.removals.get(reason, 0))
            )


class ServiceMetrics:
    """All metrics of one service, and their exposition."""

    def __init__(self, slo: Slo | None = None) -> None:
        self._registry = registry = MetricRegistry()
        self.requests = RequestMetrics(registry, slo or Slo())
        self.instances = InstanceMetrics(registry)
        self.links = LinkMetrics(registry)
        self.stores = StoreMetrics(registry)
        self._transferred = registry.counter("kv_transfer_bytes", "Bytes of KV cache handed off.")
        self._rejections = registry.counter(
            "admission_rejections", "Requests that were refused although they were right.", "reason"
        )
        self._replays = registry.counter(
            "request_replays", "Attempts begun in place of lost ones, by where those were lost.", "stage"
        )
        for stage in AttemptStage:
            self._replays.labels(stage.value)
        self._missed = registry.counter(
            "request_deadline_misses", "Requests that ended because their deadline had passed."
        )
        self._replans = registry.counter(
            "replans",
            "Searches for a better plan because the traffic had shifted, by what became of them.",
            "outcome",
        )
        for outcome in ReplanOutcome:
            self._replans.labels(outcome.value)
        self._overload: OverloadMetrics | None = None
        self._routes: RouteMetrics | None = None
        self._held = registry.gauge("num_requests_held", "Requests that no instance can take now.")

    def admission(self, admission: Admission) -> None:
        """Show who waits and runs, by API key."""
        self._registry.collectors.register(AdmissionMetrics(admission))

    def overload(self, ledger: OverloadLedger) -> None:
        """Show what overload control goes by."""
        self._overload = OverloadMetrics(self._registry, ledger)

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """Overload control predicted the TTFT of a request, which is known now."""
        if self._overload is not None:
            self._overload.predicted(predicted_s, real_s)

    def forecast(self, pools: Pools, forecast: ClusterForecast) -> None:
        """Show what routers go by that predict."""
        self._routes = RouteMetrics(self._registry, pools, forecast)

    def routed(self, route: Route) -> None:
        """A request was placed."""
        if self._routes is not None:
            self._routes.routed(route)

    def exposition(self) -> bytes:
        self.instances.refresh()
        return generate_latest(self._registry.collectors)

    def handoff(self, report: HandoffReport) -> None:
        self._transferred.inc(report.bytes_moved)

    def rejected(self, reason: str) -> None:
        """A request was refused at the door; `reason` is one of few words."""
        self._rejections.labels(reason).inc()

    def replayed(self, stage: AttemptStage) -> None:
        """A request whose attempt was lost at `stage` is tried again."""
        self._replays.labels(stage.value).inc()

    def deadline_missed(self) -> None:
        """A request was ended because its deadline had passed."""
        self._missed.inc()

    def replanned(self, outcome: ReplanOutcome) -> None:
        """Re-planning has decided something."""
        self._replans.labels(outcome.value).inc()

    def held(self, count: int) -> None:
        """So many requests wait in the controller."""
        self._held.set(count)
