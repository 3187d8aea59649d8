"""What waits at the door, for Prometheus: read from the admission when they are asked for."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from twofold.scheduling.admission import Admission, RefusalReason

ANONYMOUS = "anonymous"  # requests without a key, where none is asked for


class AdmissionMetrics(Collector):
    """Requests by API key, which is told by its name, and refusals by reason. Register it in the service's registry."""

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
        refusals = CounterMetricFamily(
            "twofold:admission_refusals", "Requests that were not taken, by reason.", labels=("reason",)
        )
        for reason in RefusalReason:
            refusals.add_metric((reason.value,), self._admission.refusals.get(reason, 0))
        yield refusals
        yield CounterMetricFamily(
            "twofold:admission_expirations",
            "Requests whose deadline passed while they waited.",
            value=self._admission.expirations,
        )
