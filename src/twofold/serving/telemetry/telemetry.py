"""What the controller tells about the service, and who hears it: metrics, history, logs and traces."""

import time
from collections.abc import Collection
from typing import Protocol

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.ledger import OverloadLedger
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.router import Route
from twofold.scheduling.instance.status import InstanceStatus
from twofold.scheduling.replan.replanner import ReplanDecision
from twofold.serving.controller.forecast import MeasuredPaths
from twofold.serving.messages import HandoffReport, LinkMeasured, StoreStatus
from twofold.serving.telemetry.context import CURRENT, RequestContext, TraceParent
from twofold.serving.telemetry.history import History
from twofold.serving.telemetry.logs import log_ended, log_rejected
from twofold.serving.telemetry.metrics import ServiceMetrics
from twofold.serving.telemetry.snapshot import AttemptStage, InstanceState, ServiceSnapshot
from twofold.slo import Slo
from twofold.timeline import Timeline


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a service besides metrics and its dashboard: spans to `otlp_endpoint`, good or bad by `slo`."""

    otlp_endpoint: str | None = None
    slo: Slo = Slo()


class Tracing(Protocol):
    """What is traced; see `twofold.serving.telemetry.tracing`, which few services import."""

    def ended(
        self, timeline: Timeline, context: RequestContext | None, span: TraceParent | None, now: float
    ) -> None: ...

    def close(self) -> None: ...


class _Origin(msgspec.Struct, frozen=True):
    """The HTTP request that a request came with, and the span it was promised."""

    context: RequestContext
    span: TraceParent


class Telemetry:
    """One method for each thing that happens; `observe` is a sink of the controller's recorder."""

    def __init__(self, model: str, *, slo: Slo | None = None, tracing: Tracing | None = None) -> None:
        self._metrics = ServiceMetrics(slo)
        self._history = History(model, slo)
        self._tracing = tracing
        self._origins: dict[str, _Origin] = {}

    def admission(self, admission: Admission) -> None:
        """Who waits and runs, by API key, is shown among the metrics."""
        self._metrics.admission(admission)

    def overload(self, ledger: OverloadLedger) -> None:
        """What overload control goes by is shown among the metrics."""
        self._metrics.overload(ledger)

    def forecast(self, pools: Pools, forecast: ClusterForecast) -> None:
        """What routers go by that predict is shown among the metrics."""
        self._metrics.forecast(pools, forecast)

    # -- requests -------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A request was taken on, in the task that answers it; `observe` is told when it ends."""
        context = CURRENT.get()
        if context is not None:
            span = context.span if not context.generations else context.span.child()
            context.generations += 1
            self._origins[request.id] = _Origin(context, span)

    def observe(self, timeline: Timeline) -> None:
        """A request ended."""
        now = time.monotonic()
        origin = self._origins.pop(timeline.request.id, None)
        context = None if origin is None else origin.context
        self._metrics.requests.observe(timeline)
        self._history.observe(timeline, now)
        log_ended(timeline, context)
        if self._tracing is not None:
            self._tracing.ended(timeline, context, None if origin is None else origin.span, now)

    def rejected(self, request: Request, reason: str) -> None:
        """A request was refused at the door; `reason` is one of few words, as in `queue_full`."""
        self._metrics.rejected(reason)
        self._history.totals[f"rejected_{reason}"] += 1
        log_rejected(request.id, request.prompt_tokens, reason, CURRENT.get())

    def routed(self, route: Route) -> None:
        """A request was placed, perhaps not for the first time."""
        self._metrics.routed(route)

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """The TTFT of a request was predicted when it came, and is known now."""
        self._metrics.predicted(predicted_s, real_s)

    def held(self, count: int) -> None:
        """So many requests wait because no instance can take them now."""
        self._metrics.held(count)

    def replayed(self, request_id: str, instance: str, stage: AttemptStage) -> None:
        """A request whose attempt was lost with `instance`, at `stage`, is tried again."""
        self._metrics.replayed(stage)
        self._history.totals["replays"] += 1
        self._history.event(f"replays {request_id}", time.monotonic(), instance)

    def replanned(self, decision: ReplanDecision) -> None:
        """Re-planning has decided something."""
        self._metrics.replanned(decision.outcome)
        self._history.totals["replans"] += 1
        self._history.event(f"re-planning: {decision.outcome.value}", time.monotonic())

    def deadline_missed(self) -> None:
        """A request was ended because its deadline had passed."""
        self._metrics.deadline_missed()
        self._history.totals["deadline_misses"] += 1

    def handoff(self, report: HandoffReport) -> None:
        """A hand-off is complete."""
        self._metrics.handoff(report)
        self._history.totals["handoffs"] += 1
        self._history.totals["transfer_bytes"] += report.bytes_moved

    def link(self, message: LinkMeasured, paths: MeasuredPaths) -> None:
        """A worker measured how KV travels to another."""
        self._metrics.links.show(message, paths)

    # -- instances ------------------------------------------------------------------------------------------------

    def role(self, instance: str, role: Role) -> None:
        """An instance is in the pool of `role` from now on; the first role told is the one it was started for."""
        self._metrics.instances.role(instance, role)
        self._history.role(instance, role, time.monotonic())

    def state(self, instance: str, state: InstanceState) -> None:
        """Whether an instance takes work; its role was told before."""
        self._metrics.instances.state(instance, state)
        self._history.state(instance, state, time.monotonic())

    def status(self, instance: str, status: InstanceStatus) -> None:
        """The accounts of an instance as it last reported them."""
        self._metrics.instances.status(instance, status)
        self._history.status(instance, status, time.monotonic())

    def step(self, instance: str, sequences: int) -> None:
        """An iteration of an instance gave a token to so many sequences."""
        self._history.step(instance, sequences, time.monotonic())

    def prefilled(self, instance: str, prompt_tokens: int, reused_tokens: int) -> None:
        """An instance that looks prompts up in its KV cache has computed one; so many of its tokens were there."""
        self._metrics.instances.prefilled(instance, prompt_tokens, reused_tokens)
        self._history.totals["prefix_queries"] += prompt_tokens
        self._history.totals["prefix_hits"] += reused_tokens

    def store(self, status: StoreStatus) -> None:
        """The store of a host tells its accounts."""
        self._metrics.stores.status(status)

    def restarted(self, instance: str) -> None:
        """A new process takes the place of an instance that was lost."""
        self._metrics.instances.restarted(instance)
        self._history.restarted(instance, time.monotonic())

    def remove(self, instance: str) -> None:
        """An instance is lost, with all it had."""
        self._metrics.instances.remove(instance)
        self._history.state(instance, InstanceState.LOST, time.monotonic())

    # -- looking --------------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """The metrics as Prometheus reads them."""
        return self._metrics.exposition()

    def snapshot(self, live: Collection[Timeline]) -> ServiceSnapshot:
        """The service now and lately; `live` are the requests that have not ended."""
        return self._history.snapshot(live)

    def close(self) -> None:
        """Send what is to be sent; may take some seconds."""
        if self._tracing is not None:
            self._tracing.close()


def make_telemetry(model: str, config: TelemetryConfig) -> Telemetry:
    """Raises ConfigurationError where there can be no traces."""
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
