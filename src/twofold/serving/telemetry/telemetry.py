"""Telemetry of the controller: metrics, recent history, logs and traces."""

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from prometheus_client import generate_latest

import twofold
from twofold.errors import ConfigurationError, RequestError, TwofoldError
from twofold.events import PlacedRequest, RequestSubscriber
from twofold.request import Request
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.ledger import OverloadLedger
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.replan.replanner import ReplanDecision, ReplanOutcome
from twofold.serving.messages import HandoffReport
from twofold.serving.telemetry.context import CURRENT, RequestContext, TraceParent
from twofold.serving.telemetry.host import HostMeter, gpu_loads
from twofold.serving.telemetry.instances import INTERVAL_S, SERIES_S, InstanceTelemetry
from twofold.serving.telemetry.latencies import BIN_S
from twofold.serving.telemetry.logs import log_ended, log_rejected
from twofold.serving.telemetry.metrics import (
    AdmissionMetrics,
    LinkMetrics,
    MetricRegistry,
    OverloadMetrics,
    RouteMetrics,
    StoreMetrics,
)
from twofold.serving.telemetry.requests import RequestTelemetry, phases
from twofold.serving.telemetry.snapshot import AttemptStage, ServiceHistory, ServiceLog, ServiceSnapshot
from twofold.slo import Slo
from twofold.timeline import Timeline

if TYPE_CHECKING:
    from twofold.serving.telemetry.tracing import Tracer

WINDOW_S = 60.0


class Telemetry(RequestSubscriber):
    """Metrics, recent history, logs and traces of a service."""

    def __init__(
        self,
        model: str,
        *,
        slo: Slo | None = None,
        tracing: "Tracer | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._slo, self._tracing = model, slo or Slo(), tracing
        self._log = ServiceLog(clock)
        self._registry = registry = MetricRegistry()
        self._requests = RequestTelemetry(registry, self._log, self._slo)
        self.instances = InstanceTelemetry(registry, self._log)
        self.links = LinkMetrics(registry)
        self.stores = StoreMetrics(registry)
        self._overload: OverloadMetrics | None = None
        self._routes: RouteMetrics | None = None
        counter = registry.counter
        self._transferred = counter("kv_transfer_bytes", "Bytes of KV cache handed off.")
        self._rejections = counter("admission_rejections", "Valid requests rejected, by reason.", "reason")
        self._replays = counter("request_replays", "Replayed attempts by the stage at which they were lost.", "stage")
        for stage in AttemptStage:
            self._replays.labels(stage.value)
        self._deadline_misses = counter("request_deadline_misses", "Requests that exceeded their deadline.")
        self._replans = counter("replans", "Re-planning searches by outcome.", "outcome")
        for outcome in ReplanOutcome:
            self._replans.labels(outcome.value)
        self.held = registry.gauge("num_requests_held", "Requests that wait for placement.")
        self._failures = counter("request_failures", "Requests that failed, by reason.", "reason")
        self._meter = HostMeter()
        self.configuration: dict[str, str] = {}  # of the service, for the dashboard
        self._origins: dict[str, tuple[RequestContext, TraceParent]] = {}  # context, and the span id sent to the client

    def admission(self, admission: Admission) -> None:
        """Register the metrics of waiting and running requests per API key."""
        self._registry.collectors.register(AdmissionMetrics(admission))

    def overload(self, ledger: OverloadLedger) -> None:
        """Register the metrics of overload control."""
        self._overload = OverloadMetrics(self._registry, ledger)

    def forecast(self, pools: Pools, forecast: ClusterForecast) -> None:
        """Register the metrics of prediction-based routing."""
        self._routes = RouteMetrics(self._registry, pools, forecast)

    def admitted(self, request: Request, now: float) -> None:
        """Link `request` to the HTTP call that is being served, for use in logs and traces."""
        context = CURRENT.get()
        if context is not None:
            span = context.span if not context.generations else context.span.child()
            context.generations += 1
            self._origins[request.id] = (context, span)

    def ended(self, timeline: Timeline, now: float) -> None:
        context, span = self._origins.pop(timeline.request.id, (None, None))
        self._requests.ended(timeline, now)
        log_ended(timeline, context, self._model)
        if self._tracing is not None:
            self._tracing.ended(timeline, context, span, now)

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        self.count_rejection(timeline.request, reason)

    def count_rejection(self, request: Request, reason: str) -> None:
        """Count and log a rejected request. `reason` is a `RefusalReason`."""
        label = reason.replace("-", "_")
        self._rejections.labels(label).inc()
        self._log.totals[f"rejected_{label}"] += 1
        log_rejected(request.id, request.prompt_tokens, label, CURRENT.get())

    def placed(self, placed: PlacedRequest, now: float) -> None:
        if self._routes is not None:
            self._routes.routed(placed.route)

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """Record the relative error of a predicted TTFT. The measured TTFT is `real_s`."""
        if self._overload is not None:
            self._overload.predicted(predicted_s, real_s)

    def replayed(self, request_id: str, instance: str, stage: AttemptStage) -> None:
        """Record that a request in `stage` runs again, because `instance` was lost."""
        self._replays.labels(stage.value).inc()
        self._log.totals["replays"] += 1
        self._log.event(f"replays {request_id}", instance)

    def failed(self, error: TwofoldError) -> None:
        """Count a request that fails with `error`."""
        reason = (error.code or "other") if isinstance(error, RequestError) else "instance_lost"
        self._failures.labels(reason).inc()
        self._log.totals[f"failed_{reason}"] += 1

    def deadline_missed(self) -> None:
        self._deadline_misses.inc()
        self._log.totals["deadline_misses"] += 1

    def handoff(self, report: HandoffReport) -> None:
        self._transferred.inc(report.bytes_moved)
        self._log.totals["handoffs"] += 1
        self._log.totals["transfer_bytes"] += report.bytes_moved

    def replanned(self, decision: ReplanDecision) -> None:
        self._replans.labels(decision.outcome.value).inc()
        self._log.totals["replans"] += 1
        self._log.event(f"re-planning: {decision.outcome.value}")

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        self._requests.count()
        self.instances.refresh()
        return generate_latest(self._registry.collectors)

    def snapshot(self, live: Collection[Timeline]) -> ServiceSnapshot:
        """Return the current state and recent history of the service."""
        now, latencies, instances = self._log.clock(), self._requests.latencies(live), self.instances.snapshot()
        return ServiceSnapshot(
            model=self._model,
            version=twofold.__version__,
            now_s=now,
            unix_s=time.time(),
            started_s=self._log.start_s,
            interval_s=INTERVAL_S,
            slo=self._slo,
            instances=instances,
            phases=phases(live, sum(each.status.waiting for each in instances)),
            handoffs_in_flight=sum(each.status.arriving for each in instances),
            requests=self._requests.snapshot(live),
            flow=latencies.flow(now, last=SERIES_S // int(BIN_S)),
            recent=latencies.recent(now, WINDOW_S),
            totals=dict(self._log.totals),
            events=tuple(self._log.events),
            configuration=self.configuration,
            host=(self._meter.sample(), *gpu_loads()),
        )

    def history(self, live: Collection[Timeline]) -> ServiceHistory:
        """Return the history of the service, of up to six hours."""
        now = self._log.clock()
        flow = self._requests.latencies(live).flow(now)
        first = int((now - self._log.start_s) // flow.bin_s) + 1 - len(flow.tokens)
        return ServiceHistory(first=first, flow=flow, samples=self.instances.samples())

    def close(self) -> None:
        """Export the remaining trace spans, which may take some seconds."""
        if self._tracing is not None:
            self._tracing.close()


def make_telemetry(model: str, otlp_endpoint: str | None, slo: Slo | None) -> Telemetry:
    """Create a service's telemetry. Raise ConfigurationError if traces cannot be exported."""
    tracing = None
    if otlp_endpoint:
        try:
            from twofold.serving.telemetry.tracing import Tracer, otlp_exporter  # noqa: PLC0415 (an extra, and slow)

            tracing = Tracer(model, otlp_exporter(otlp_endpoint))
        except ImportError as error:
            raise ConfigurationError(
                "--otlp-endpoint needs OpenTelemetry: install it with pip install 'twofold[otel]'"
            ) from error
    return Telemetry(model, slo=slo, tracing=tracing)
