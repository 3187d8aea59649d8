"""Telemetry of the controller: forwards events to metrics, history, logs and traces."""

import logging
import time
from collections.abc import Collection
from typing import Protocol

import msgspec

from twofold.errors import ConfigurationError
from twofold.events import PlacedRequest, RequestSubscriber
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.ledger import OverloadLedger
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.instance.status import InstanceStatus
from twofold.scheduling.replan.replanner import ReplanDecision
from twofold.serving.controller.forecast import MeasuredPaths
from twofold.serving.messages import HandoffReport, LinkMeasured, StoreStatus
from twofold.serving.telemetry.context import CURRENT, RequestContext, TraceParent
from twofold.serving.telemetry.history import History
from twofold.serving.telemetry.logs import FIELDS
from twofold.serving.telemetry.metrics import AdmissionMetrics, OverloadMetrics, RouteMetrics, ServiceMetrics
from twofold.serving.telemetry.snapshot import AttemptStage, InstanceState, ServiceSnapshot
from twofold.slo import Slo
from twofold.timeline import Timeline

request_log = logging.getLogger("twofold.requests")


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Trace collector and SLO of a service's telemetry."""

    otlp_endpoint: str | None = None
    slo: Slo = Slo()


class Tracing(Protocol):
    """Implemented by `twofold.serving.telemetry.tracing`, which is imported only when tracing is enabled."""

    def ended(
        self, timeline: Timeline, context: RequestContext | None, span: TraceParent | None, now: float
    ) -> None: ...

    def close(self) -> None: ...


class _Origin(msgspec.Struct, frozen=True):
    """The HTTP request of a generation, and the span id returned to its client."""

    context: RequestContext
    span: TraceParent


class Telemetry(RequestSubscriber):
    """Metrics, history, logs and traces of a service."""

    def __init__(self, model: str, *, slo: Slo | None = None, tracing: Tracing | None = None) -> None:
        self._metrics = ServiceMetrics(slo)
        self._history = History(model, slo)
        self._tracing = tracing
        self._origins: dict[str, _Origin] = {}

    def admission(self, admission: Admission) -> None:
        """Add metrics by API key."""
        self._metrics.registry.collectors.register(AdmissionMetrics(admission))

    def overload(self, ledger: OverloadLedger) -> None:
        """Add metrics of overload control."""
        self._metrics.overload = OverloadMetrics(self._metrics.registry, ledger)

    def forecast(self, pools: Pools, forecast: ClusterForecast) -> None:
        """Add metrics of predictive routers."""
        self._metrics.routes = RouteMetrics(self._metrics.registry, pools, forecast)

    # -- requests -------------------------------------------------------------------------------------------------

    def admitted(self, request: Request, now: float) -> None:
        """Remember the HTTP request of the current task, for traces and logs."""
        context = CURRENT.get()
        if context is not None:
            span = context.span if not context.generations else context.span.child()
            context.generations += 1
            self._origins[request.id] = _Origin(context, span)

    def ended(self, timeline: Timeline, now: float) -> None:
        origin = self._origins.pop(timeline.request.id, None)
        context = None if origin is None else origin.context
        self._metrics.requests.observe(timeline)
        self._history.observe(timeline, now)
        log_ended(timeline, context)
        if self._tracing is not None:
            self._tracing.ended(timeline, context, None if origin is None else origin.span, now)

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        self.count_rejection(timeline.request, reason)

    def count_rejection(self, request: Request, reason: str) -> None:
        """Count and log a rejection, at arrival or after prefill; `reason` is a `RefusalReason`."""
        label = reason.replace("-", "_")
        self._metrics.rejections.labels(label).inc()
        self._history.totals[f"rejected_{label}"] += 1
        log_rejected(request.id, request.prompt_tokens, label, CURRENT.get())

    def placed(self, placed: PlacedRequest, now: float) -> None:
        if self._metrics.routes is not None:
            self._metrics.routes.routed(placed.route)

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """Record a predicted and a measured TTFT."""
        if self._metrics.overload is not None:
            self._metrics.overload.predicted(predicted_s, real_s)

    def held(self, count: int) -> None:
        """Record the number of requests that wait for placement."""
        self._metrics.held.set(count)

    def replayed(self, request_id: str, instance: str, stage: AttemptStage) -> None:
        """Record the replay of an attempt that was lost with `instance` at `stage`."""
        self._metrics.replays.labels(stage.value).inc()
        self._history.totals["replays"] += 1
        self._history.event(f"replays {request_id}", time.monotonic(), instance)

    def deadline_missed(self) -> None:
        """Record a request that exceeded its deadline."""
        self._metrics.deadline_misses.inc()
        self._history.totals["deadline_misses"] += 1

    def handoff(self, report: HandoffReport) -> None:
        """Record a completed hand-off."""
        self._metrics.transferred.inc(report.bytes_moved)
        self._history.totals["handoffs"] += 1
        self._history.totals["transfer_bytes"] += report.bytes_moved

    # -- instances ------------------------------------------------------------------------------------------------

    def role(self, instance: str, role: Role) -> None:
        """Record the current role of an instance; the first one is its home."""
        self._metrics.instances.role(instance, role)
        self._history.role(instance, role, time.monotonic())

    def state(self, instance: str, state: InstanceState) -> None:
        """Record the state of an instance with a known role."""
        self._metrics.instances.state(instance, state)
        self._history.state(instance, state, time.monotonic())

    def status(self, instance: str, status: InstanceStatus) -> None:
        """Record the last reported status of an instance."""
        self._metrics.instances.status(instance, status)
        self._history.status(instance, status, time.monotonic())

    def step(self, instance: str, sequences: int) -> None:
        """Record an iteration that gave a token to this many sequences."""
        self._history.step(instance, sequences, time.monotonic())

    def prefilled(self, instance: str, prompt_tokens: int, reused_tokens: int) -> None:
        """Record the prefix cache lookup of a prefilled prompt."""
        self._metrics.instances.prefilled(instance, prompt_tokens, reused_tokens)
        self._history.totals["prefix_queries"] += prompt_tokens
        self._history.totals["prefix_hits"] += reused_tokens

    def restarted(self, instance: str) -> None:
        """Record the restart of an instance."""
        self._metrics.instances.restarted(instance)
        self._history.restarted(instance, time.monotonic())

    def remove(self, instance: str) -> None:
        """Record the loss of an instance."""
        self._metrics.instances.remove(instance)
        self._history.state(instance, InstanceState.LOST, time.monotonic())

    def replanned(self, decision: ReplanDecision) -> None:
        """Record a re-planning decision."""
        self._metrics.replans.labels(decision.outcome.value).inc()
        self._history.totals["replans"] += 1
        self._history.event(f"re-planning: {decision.outcome.value}", time.monotonic())

    def link(self, message: LinkMeasured, paths: MeasuredPaths) -> None:
        """Record a measured link."""
        self._metrics.links.show(message, paths)

    def store(self, status: StoreStatus) -> None:
        """Record the counters of a host store."""
        self._metrics.stores.status(status)

    # -- output ---------------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return self._metrics.exposition()

    def snapshot(self, live: Collection[Timeline]) -> ServiceSnapshot:
        """Return the current state and recent history, with the `live` requests."""
        return self._history.snapshot(live)

    def close(self) -> None:
        """Export remaining traces; takes up to some seconds."""
        if self._tracing is not None:
            self._tracing.close()


def log_ended(timeline: Timeline, context: RequestContext | None) -> None:
    """Log one line for a finished request."""
    if not request_log.isEnabledFor(logging.INFO):
        return
    reason = timeline.finish_reason
    fields = _identity(timeline.request.id, context) | {
        "prompt_tokens": timeline.request.prompt_tokens,
        "output_tokens": timeline.output_tokens,
        "finish_reason": None if reason is None else reason.value,
        "prefill_instance": timeline.prefill_instance,
        "decode_instance": timeline.decode_instance,
        "queue_s": _rounded(timeline.queue_prefill_s),
        "prefill_s": _rounded(timeline.prefill_s),
        "transfer_s": _rounded(timeline.transfer_s),
        "ttft_s": _rounded(timeline.ttft_s),
        "tpot_s": _rounded(timeline.tpot_s),
        "e2e_s": _rounded(timeline.e2e_s),
    }
    request_log.info("request ended", extra={FIELDS: fields})


def log_rejected(request_id: str, prompt_tokens: int, reason: str, context: RequestContext | None) -> None:
    """Log one line for a rejected request."""
    if request_log.isEnabledFor(logging.INFO):
        fields = _identity(request_id, context) | {"prompt_tokens": prompt_tokens, "reason": reason}
        request_log.info("request rejected", extra={FIELDS: fields})


def _identity(request_id: str, context: RequestContext | None) -> dict[str, object]:
    if context is None:
        return {"id": request_id}
    return {
        "id": request_id,
        "request_id": context.id,
        "trace_id": context.span.trace_id,
        "operation": context.operation,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def make_telemetry(model: str, config: TelemetryConfig) -> Telemetry:
    """Create the telemetry; raises ConfigurationError if tracing is not available."""
    tracing = None
    if config.otlp_endpoint is not None:
        try:
            from twofold.serving.telemetry.tracing import Tracer, otlp_exporter  # noqa: PLC0415 (an extra, and slow)

            tracing = Tracer(model, otlp_exporter(config.otlp_endpoint))
        except ImportError as error:
            raise ConfigurationError(
                "--otlp-endpoint needs OpenTelemetry: install it with pip install 'twofold[otel]'"
            ) from error
    return Telemetry(model, slo=config.slo, tracing=tracing)
