"""Forecasts of prefill and transfer times with round numbers."""

from twofold.kvcache.index import PrefixIndex
from twofold.scheduling.cluster.forecast import ClusterForecast, Prediction

BLOCK_TOKENS = 100


class Proportional(Prediction):
    """Prediction of prefill and transfer times that are proportional to the number of blocks."""

    def __init__(self, per_block_s: float = 1.0, transfer_s: float = 0.1) -> None:
        self.per_block_s, self.per_block_transfer_s = per_block_s, transfer_s

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        return (tokens - reused) / BLOCK_TOKENS * self.per_block_s

    def transfer_s(self, tokens: int) -> float:
        return tokens / BLOCK_TOKENS * self.per_block_transfer_s


def forecast(*instances: str, prediction: Prediction | None = None) -> ClusterForecast:
    """Return a TTFT forecaster for idle instances with empty prefix caches."""
    made = ClusterForecast(PrefixIndex(), BLOCK_TOKENS)
    for instance in instances:
        made.join(instance, prediction or Proportional())
    return made
