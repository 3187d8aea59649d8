"""Load forecasts for prediction-based routers: predicted prefill queue and cached blocks of each instance."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.instance import InstanceLoad
from twofold.kvcache.index import PrefixIndex
from twofold.performance.base import PerformanceModel
from twofold.performance.reuse import layer_wise
from twofold.performance.transfer import TransferModel
from twofold.request import BlockKey

_MANY: Final = 1 << 14  # cached prefill times


@mypyc_attr(allow_interpreted_subclasses=True)
class Prediction(ABC):
    """Predicts prefill and transfer times of one instance, in seconds."""

    @abstractmethod
    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        """Predict the prefill time of `tokens` tokens; the first `reused` of them are loaded from the prefix cache."""

    @abstractmethod
    def transfer_s(self, tokens: int) -> float:  # over an idle link
        """Predict the time to fetch the KV of `tokens` tokens from another cache; inf if impossible."""


class ModelPrediction(Prediction):
    """Predicts times with a performance model."""

    def __init__(self, model: PerformanceModel, transfer: TransferModel, load_token_s: float) -> None:
        self._model = model
        self._transfer = transfer
        self._load_token_s = load_token_s  # to load the KV of a cached token
        self._prefills: dict[tuple[int, int], float] = {}

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        known = self._prefills.get((tokens, reused))
        if known is None:
            if len(self._prefills) >= _MANY:
                self._prefills.clear()
            known = self._model.prefill_s(tokens - reused, tokens * tokens - reused * reused)
            if reused:
                known = layer_wise(self._transfer.layers, reused * self._load_token_s, known)
            self._prefills[tokens, reused] = known
        return known

    def transfer_s(self, tokens: int) -> float:
        return self._transfer.serialized_s(tokens) if tokens else 0.0


class _Queue:
    """The unfinished prefills of an instance, with predicted durations in seconds."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.prefills: dict[str, float] = {}  # in order
        self.since = 0.0  # start of the first prefill: its placement, or the end of the prefill before it
        self.total_s = 0.0
        self.assigned_s = 0.0


class PrefixMatches:
    """Number of leading prompt blocks stored in each shared cache and in each instance's own memory."""

    def __init__(self, caches: dict[str, int], memories: dict[str, int]) -> None:
        self._caches, self._memories = caches, memories
        self.longest, self.source = 0, ""  # longest prefix in a shared cache, and the id of this cache
        for cache, blocks in caches.items():
            if blocks > self.longest:
                self.longest, self.source = blocks, cache

    def cached_blocks(self, load: InstanceLoad) -> int:
        """Return the length of the prefix that an instance can reuse without a fetch, in blocks."""
        return max(self._caches.get(load.cache, 0), self._memories.get(load.id, 0))


@mypyc_attr(allow_interpreted_subclasses=True)
class ClusterForecast:
    """Predicted prefill queues and cached blocks of all instances. Times are seconds on the caller's clock."""

    def __init__(self, prefixes: PrefixIndex, block_tokens: int) -> None:
        # The caller updates both indexes.
        self.prefixes = prefixes  # blocks in shared caches (`InstanceLoad.cache`), from which instances can fetch
        self.memories = PrefixIndex()  # blocks in each instance's own memory
        self.block_tokens = block_tokens
        self._queues: dict[str, _Queue] = {}
        self._placed: dict[str, str] = {}  # instance by request in prefill
        self._now = 0.0

    def join(self, instance: str, prediction: Prediction) -> None:
        """Add an instance with an empty queue. `prediction` predicts its prefill and transfer times."""
        self.leave(instance)
        self._queues[instance] = _Queue(prediction)

    def leave(self, instance: str) -> None:
        """Empty the queue of an instance that has left."""
        queue = self._queues.get(instance)
        if queue is not None:
            for request_id in queue.prefills:
                del self._placed[request_id]
            self._queues[instance] = _Queue(queue.prediction)  # keeps its predictions

    def prediction(self, instance: str) -> Prediction:
        """Return the predictor of an instance's prefill and fetch times. Raises KeyError for an unknown instance."""
        return self._queues[instance].prediction

    def queue_s(self, instance: str, now: float) -> float:
        """Predict the seconds until all queued prefills of an instance have ended."""
        queue = self._queues[instance]
        if not queue.prefills:
            return 0.0
        first_s = next(iter(queue.prefills.values()))
        return max(0.0, queue.total_s - min(max(0.0, now - queue.since), first_s))

    def assigned_s(self, instance: str) -> float:
        """Return the running total of predicted prefill seconds that an instance has been assigned."""
        return self._queues[instance].assigned_s

    def matches(self, keys: Sequence[BlockKey]) -> PrefixMatches:
        """Look up a prompt's cached prefixes in all shared caches and all instances' memories."""
        return PrefixMatches(self.prefixes.prefixes(keys), self.memories.prefixes(keys))

    def cached_blocks(self, load: InstanceLoad, keys: Sequence[BlockKey]) -> int:
        """Return the length of a prompt's prefix that an instance can reuse without a fetch, in blocks."""
        return max(self.prefixes.prefix(load.cache, keys), self.memories.prefix(load.id, keys))

    def reused_tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Return how many prompt tokens need no prefill, given the number of cached blocks."""
        return min(blocks * self.block_tokens, prompt_tokens - 1)  # the last token is always computed

    def placed(self, request_id: str, instance: str, tokens: int, reused: int, now: float) -> None:
        """Add the prefill of a request to the queue of an instance."""
        queue = self._queues.get(instance)
        if queue is None:
            return
        self._now = now
        seconds = queue.prediction.prefill_s(tokens, reused)
        if not queue.prefills:
            queue.since, queue.total_s = now, 0.0
        queue.prefills[request_id] = seconds
        queue.total_s += seconds
        queue.assigned_s += seconds
        self._placed[request_id] = instance

    def prefill_ended(self, request_id: str, now: float | None = None) -> None:
        """Remove a completed or aborted prefill from its instance's queue."""
        instance = self._placed.pop(request_id, None)
        if instance is None:
            return
        self._now = self._now if now is None else now
        queue = self._queues[instance]
        if next(iter(queue.prefills)) == request_id:
            queue.since = self._now  # the next prefill starts
        queue.total_s -= queue.prefills.pop(request_id)
