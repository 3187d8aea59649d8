"""Who is at the door, for Prometheus: read from the admission when it is asked for."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twofold.scheduling.admission import Admission

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
