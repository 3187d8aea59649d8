"""Where the metrics of one service are registered."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "twofold:"


class Registry:
    """Makes metrics with our prefix; nothing global, so several services can live in one process."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.collectors, buckets=buckets)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.collectors)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.collectors)
