"""What is expected of one instance: how long its prefills take, and transfers to it.

A simulation knows from the performance model, and a live service from a profile of its host or from what its workers
measured: routers do not ask which.

What routers may know of a cluster besides its loads: predicted queues, and which cache has which blocks.
"""

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

_MANY: Final = 1 << 14  # prefills whose times are kept


@mypyc_attr(allow_interpreted_subclasses=True)
class Prediction(ABC):
    """Seconds of the work of one instance, or of all instances of a kind."""

    @abstractmethod
    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        """Of the prefill of a prompt of `tokens` tokens that runs alone, the KV of the first `reused` of which is in
        the cache beside the instance and only loaded."""
        ...

    @abstractmethod
    def transfer_s(self, tokens: int) -> float:
        """Until KV of so many tokens is here from the cache of another instance, with nobody else on the way; infinite
        where it cannot come here."""
        ...


class ModelPrediction(Prediction):
    """The times of a performance model; `load_token_s` is what KV of a token takes from the cache to the instance."""

    def __init__(self, model: PerformanceModel, transfer: TransferModel, load_token_s: float) -> None:
        self._model = model
        self._transfer = transfer
        self._load_token_s = load_token_s
        self._prefills: dict[tuple[int, int], float] = {}

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        known = self._prefills.get((tokens, reused))
        if known is None:
            if len(self._prefills) >= _MANY:
                self._prefills.clear()
            known = self._prefills[tokens, reused] = self._prefill_s(tokens, reused)
        return known

    def _prefill_s(self, tokens: int, reused: int) -> float:
        compute_s = self._model.prefill_s(tokens - reused, tokens * tokens - reused * reused)
        if not reused:
            return compute_s
        return layer_wise(self._transfer.layers, reused * self._load_token_s, compute_s)

    def transfer_s(self, tokens: int) -> float:
        return self._transfer.serialized_s(tokens) if tokens else 0.0


class _Queue:
    """The prefills that were placed on an instance and are not done, in order, with the seconds that each will take.

    `since` is when the first of them began, as far as can be told: when it was placed, or the one before it was done.
    """

    __slots__ = ("assigned_s", "prediction", "prefills", "since", "total_s")

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.prefills: dict[str, float] = {}
        self.since = 0.0
        self.total_s = 0.0
        self.assigned_s = 0.0


class PrefixMatches:
    """Where the leading blocks of one prompt are: at most `longest` in one cache, of which `source` is the first."""

    __slots__ = ("_caches", "_memories", "longest", "source")

    def __init__(self, caches: dict[str, int], memories: dict[str, int]) -> None:
        self._caches, self._memories = caches, memories
        self.longest, self.source = 0, ""
        for cache, blocks in caches.items():
            if blocks > self.longest:
                self.longest, self.source = blocks, cache

    def cached_blocks(self, load: InstanceLoad) -> int:
        """How many an instance finds without a fetch, in its cache or in its own memory."""
        return max(self._caches.get(load.cache, 0), self._memories.get(load.id, 0))


@mypyc_attr(allow_interpreted_subclasses=True)
class ClusterForecast:
    """Predictions of every instance, the queues that follow from what was placed on them, and the caches' blocks.

    `prefixes` has the blocks of each cache (`InstanceLoad.cache`), which others may fetch from, and `memories`
    those that an instance, by its id, keeps for itself besides. Both are kept up to date by whoever hears of blocks
    that are stored and removed; a block is `block_tokens` tokens. Times are seconds on the clock of whoever says them.
    """

    def __init__(self, prefixes: PrefixIndex, block_tokens: int) -> None:
        self.prefixes = prefixes
        self.memories = PrefixIndex()
        self.block_tokens = block_tokens
        self._queues: dict[str, _Queue] = {}
        self._placed: dict[str, str] = {}  # the instance of each request that is not prefilled
        self._now = 0.0

    def join(self, instance: str, prediction: Prediction) -> None:
        """An instance of which this is expected; what waited there under the same name is forgotten."""
        self.leave(instance)
        self._queues[instance] = _Queue(prediction)

    def leave(self, instance: str) -> None:
        """An instance is gone, and its queue; what is expected of it stays known for when it comes back."""
        queue = self._queues.get(instance)
        if queue is not None:
            for request_id in queue.prefills:
                del self._placed[request_id]
            self._queues[instance] = _Queue(queue.prediction)

    def prediction(self, instance: str) -> Prediction:
        """What is expected of an instance; raises KeyError where it never joined."""
        return self._queues[instance].prediction

    def queue_s(self, instance: str, now: float) -> float:
        """Seconds until the prefills that were placed on an instance will be done."""
        queue = self._queues[instance]
        if not queue.prefills:
            return 0.0
        first_s = next(iter(queue.prefills.values()))
        return max(0.0, queue.total_s - min(max(0.0, now - queue.since), first_s))

    def assigned_s(self, instance: str) -> float:
        """Seconds of all prefills that an instance was ever given: among equals, who had least may be next."""
        return self._queues[instance].assigned_s

    def matches(self, keys: Sequence[BlockKey]) -> "PrefixMatches":
        """How many leading blocks of a prompt are where."""
        return PrefixMatches(self.prefixes.prefixes(keys), self.memories.prefixes(keys))

    def cached_blocks(self, load: InstanceLoad, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a prompt one instance finds without a fetch."""
        return max(self.prefixes.prefix(load.cache, keys), self.memories.prefix(load.id, keys))

    def reused_tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Tokens of a prompt that need not be computed where its leading blocks are there: never the last one, whose
        computation gives the first output token."""
        return min(blocks * self.block_tokens, prompt_tokens - 1)

    def placed(self, request_id: str, instance: str, tokens: int, reused: int, now: float) -> None:
        """A prompt was placed on an instance, which will reuse so many tokens of it."""
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
        """A prompt is computed, or given up; None: nobody looked when, but not before anything said earlier."""
        instance = self._placed.pop(request_id, None)
        if instance is None:
            return
        self._now = self._now if now is None else now
        queue = self._queues[instance]
        if next(iter(queue.prefills)) == request_id:
            queue.since = self._now  # the next one begins
        queue.total_s -= queue.prefills.pop(request_id)
