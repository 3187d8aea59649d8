"""What the blocks of prompts are called here, and in the events of vLLM's prefix caches: the same.

What routers predict by: how fast servers are, by their metrics, and what they have cached, by their events.

Early rejection: who would wait too long for a first token is told so at once (Mooncake section 7.2).
"""

import secrets
from math import ceil, inf

import msgspec
import zmq.asyncio

from twofold.instance import InstanceLoad
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.prefix import prefix_keys, tenant_salt
from twofold.request import Generation
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.limits import AdmissionLimits, Refusal, RefusalReason
from twofold.scheduling.admission.queue import Ticket
from twofold.scheduling.cluster.forecast import ClusterForecast, Prediction
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.upstream.config import ServerConfig
from twofold.serving.upstream.kv_events import BlockKeyMap, CacheChanges, EventBatch, EventFeed
from twofold.serving.upstream.metrics import PrefillTotals, ServerMetrics


class UpstreamPromptKeys:
    """Names the full blocks of prompts, of `block_tokens` tokens each; of none before that is known.

    vLLM keeps prompts apart by their `cache_salt` alone. So each API key has one, which follows from a secret of this
    start: a key finds what it has asked itself. Where no keys are asked for, the salt is the client's own, or none.
    """

    def __init__(self) -> None:
        self.block_tokens = 0
        self._secret = secrets.token_bytes(32)

    def name(self, generation: Generation) -> Generation:
        """The same with the keys of its prompt's blocks, and with the salt that the servers are to be given."""
        salt = self._salt(generation)
        blocks: tuple[bytes, ...] = ()
        if self.block_tokens:
            blocks = tuple(prefix_keys(generation.prompt_token_ids, self.block_tokens, salt.encode()))
        request = msgspec.structs.replace(generation.request, prefix_blocks=blocks)
        return msgspec.structs.replace(generation, request=request, cache_salt=salt)

    def _salt(self, generation: Generation) -> str:
        if not generation.key:
            return generation.cache_salt
        own = tenant_salt(generation.key, secret=self._secret)
        return tenant_salt(generation.cache_salt, secret=own).hex()


# Prompts of fewer tokens, those of a server that decodes above all (it computes the last one), say what a request takes
# by itself and nothing of a token.
LEAST_TOKENS = 64
MEMORY_TOKENS = 16384  # what was computed before counts as no more than these
NOMINAL_S = 1e-3  # of a prompt token, before any server has computed one: only which is faster matters


class UpstreamForecast:
    """Fills a `ClusterForecast` for servers, once the first of them has said how large its blocks are.

    Each server finds what is in its own cache and nothing else: nobody can ask them to fetch from each other.
    """

    def __init__(self, context: "zmq.asyncio.Context", names: UpstreamPromptKeys) -> None:
        self.forecast = ClusterForecast(PrefixIndex(), 0)
        self._context, self._names = context, names
        self._speeds = PrefillSpeeds()
        self._feeds: dict[str, EventFeed] = {}

    def joined(self, server: ServerConfig, load: InstanceLoad, readings: ServerMetrics) -> None:
        """A server is there, perhaps not for the first time."""
        self.forecast.block_tokens = self._names.block_tokens = (
            self._names.block_tokens or readings.block_tokens
        )
        self.forecast.join(load.id, ServerPrediction(load.id, self._speeds))
        if server.events is not None and load.id not in self._feeds:
            blocks = _Blocks(load.id, self.forecast.memories, self._names.block_tokens)
            feed = self._feeds[load.id] = EventFeed(server, self._context, blocks.follow, blocks.forget)
            feed.start()

    def read(self, instance: str, readings: ServerMetrics) -> None:
        """A server has told how it is."""
        self._speeds.read(instance, readings.prefills)

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.stop()


class PrefillSpeeds:
    """Seconds of a prompt token on each server, queues not counted, as it is of late."""

    def __init__(self) -> None:
        self._read: dict[str, PrefillTotals] = {}
        self._counted: dict[str, PrefillTotals] = {}

    def read(self, instance: str, told: PrefillTotals) -> None:
        """A server tells of its prompts so far."""
        new = told.since(self._read.get(instance, PrefillTotals()))
        self._read[instance] = told
        if new.requests <= 0 or new.tokens < LEAST_TOKENS * new.requests:
            return
        before = self._counted.get(instance, PrefillTotals())
        share = MEMORY_TOKENS / max(before.tokens, MEMORY_TOKENS)
        self._counted[instance] = PrefillTotals(
            before.seconds * share + new.seconds, before.tokens * share + new.tokens
        )

    def of(self, instance: str) -> float:
        """What it is on one server; while that has computed none, what it is on the others on average."""
        counted = self._counted.get(instance)
        if counted is not None:
            return counted.token_s
        known = [each.token_s for each in self._counted.values()]
        return sum(known) / len(known) if known else NOMINAL_S


class ServerPrediction(Prediction):
    """Of one server: so many seconds for each token that it has to compute."""

    def __init__(self, instance: str, speeds: PrefillSpeeds) -> None:
        self._instance, self._speeds = instance, speeds

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        return (tokens - reused) * self._speeds.of(self._instance)

    def transfer_s(self, tokens: int) -> float:  # noqa: ARG002
        return inf


class _Blocks:
    """What one server has, in the index that routers ask."""

    def __init__(self, instance: str, index: PrefixIndex, block_tokens: int) -> None:
        self._instance, self._index = instance, index
        self._block_tokens = block_tokens
        self._known = BlockKeyMap(block_tokens)

    def follow(self, batch: EventBatch) -> None:
        for change in self._known.follow(batch):
            self._apply(change)

    def forget(self) -> None:
        """Nobody knows what it has."""
        self._known = BlockKeyMap(self._block_tokens)
        self._index.lost(self._instance)

    def _apply(self, change: CacheChanges) -> None:
        if change.cleared:
            self._index.lost(self._instance)
        self._index.removed(self._instance, change.removed)
        if change.stored:
            self._index.stored(self._instance, change.stored)


class EarlyRejection(Admission):
    """Refuses a request whose first token is predicted later than `ttft_s` seconds after it is placed.

    The router predicts, so it must be one that does (`FORECASTING_ROUTERS`). Of decodes nothing is predicted: nobody
    knows how fast the servers of somebody else decode how many together.
    """

    def __init__(self, limits: AdmissionLimits, cluster: ClusterScheduler, ttft_s: float) -> None:
        super().__init__(limits)
        self._cluster, self._ttft_s = cluster, ttft_s

    def judge(self, ticket: Ticket, now: float) -> Refusal | None:
        route = self._cluster.would_place(ticket.request, now)
        if route is None or route.ttft_s is None or route.ttft_s <= self._ttft_s:
            return None
        return Refusal(RefusalReason.PREFILL_LOAD, max(1, ceil(route.ttft_s - self._ttft_s)))
