"""Overload control, for Prometheus: the loads that it goes by, and how near its predictions come."""

import time
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twofold.scheduling.overload.ledger import Ledger
from twofold.serving.registry import Registry

ERROR_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


class OverloadMetrics(Collector):
    """Loads are read from the ledger when they are asked for."""

    def __init__(self, registry: Registry, ledger: Ledger) -> None:
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
