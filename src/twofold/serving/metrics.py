"""Prometheus metrics of the service. Names follow vLLM's where they mean the same, with our prefix.

The same as vLLM's, as of its release 0.32: time_to_first_token_seconds, inter_token_latency_seconds,
request_time_per_output_token_seconds, e2e_request_latency_seconds, request_queue_time_seconds,
request_prefill_time_seconds, request_decode_time_seconds, request_prompt_tokens, request_generation_tokens,
request_success_total, prompt_tokens_total, generation_tokens_total, admission_rejections_total,
num_requests_running, num_requests_waiting, kv_cache_usage_perc.
"""

from prometheus_client import generate_latest

from twofold.scheduling.admission import Admission
from twofold.scheduling.forecast import Forecast
from twofold.scheduling.overload.ledger import Ledger
from twofold.scheduling.pools import Pools
from twofold.scheduling.replan_log import Outcome
from twofold.scheduling.route import Route
from twofold.serving.admission_metrics import AdmissionMetrics
from twofold.serving.instance_metrics import InstanceMetrics
from twofold.serving.link_metrics import LinkMetrics
from twofold.serving.live_request import AttemptStage
from twofold.serving.messages import HandoffReport
from twofold.serving.overload_metrics import OverloadMetrics
from twofold.serving.registry import Registry
from twofold.serving.request_metrics import RequestMetrics
from twofold.serving.route_metrics import RouteMetrics
from twofold.serving.store_metrics import StoreMetrics
from twofold.slo import Slo


class ServiceMetrics:
    """All metrics of one service, and their exposition."""

    def __init__(self, slo: Slo | None = None) -> None:
        self._registry = registry = Registry()
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
        for outcome in Outcome:
            self._replans.labels(outcome.value)
        self._overload: OverloadMetrics | None = None
        self._routes: RouteMetrics | None = None
        self._held = registry.gauge("num_requests_held", "Requests that no instance can take now.")

    def admission(self, admission: Admission) -> None:
        """Show who waits and runs, by API key."""
        self._registry.collectors.register(AdmissionMetrics(admission))

    def overload(self, ledger: Ledger) -> None:
        """Show what overload control goes by."""
        self._overload = OverloadMetrics(self._registry, ledger)

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """Overload control predicted the TTFT of a request, which is known now."""
        if self._overload is not None:
            self._overload.predicted(predicted_s, real_s)

    def forecast(self, pools: Pools, forecast: Forecast) -> None:
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

    def replanned(self, outcome: Outcome) -> None:
        """Re-planning has decided something."""
        self._replans.labels(outcome.value).inc()

    def held(self, count: int) -> None:
        """So many requests wait in the controller."""
        self._held.set(count)
