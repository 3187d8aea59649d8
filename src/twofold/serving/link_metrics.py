"""Metrics of what workers measured when they met: links, prefill, and what follows for hand-offs."""

from twofold.serving.measured_paths import MeasuredPaths
from twofold.serving.registry import Registry


class LinkMetrics:
    """What hand-off policies go by."""

    def __init__(self, registry: Registry) -> None:
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

    def show(self, paths: MeasuredPaths) -> None:
        """All that is known now."""
        for pair, link in paths.links.items():
            self._bytes.labels(*pair).set(link.bytes_per_s)
            self._overhead.labels(*pair).set(link.overhead_s)
            self._crossover.labels(pair[0]).set(paths.crossover(pair[0]))
        for instance, speed in paths.prefills.items():
            self._prefill.labels(instance).set(speed.s_per_token)
