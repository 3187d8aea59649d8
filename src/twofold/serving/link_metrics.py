"""Metrics of what workers measured when they met: links, prefill, and what follows for hand-offs."""

from functools import partial

from twofold.serving.measured_paths import MeasuredPaths
from twofold.serving.messages import LinkMeasured
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

    def show(self, message: LinkMeasured, paths: MeasuredPaths) -> None:
        """A link was measured. What follows from all links of its source is computed when somebody looks."""
        source = message.source
        self._bytes.labels(source, message.target).set(message.speed.bytes_per_s)
        self._overhead.labels(source, message.target).set(message.speed.overhead_s)
        self._crossover.labels(source).set_function(partial(paths.crossover, source))
        speed = paths.prefills.get(source)
        if speed is not None:
            self._prefill.labels(source).set(speed.s_per_token)
