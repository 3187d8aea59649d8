"""TTFT prediction for vLLM servers, from prefill speeds in their metrics and cached prefixes in their KV events."""

import secrets
from math import ceil, inf

import msgspec
import zmq.asyncio

from twofold.instance import InstanceLoad
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.prefix import prefix_keys, tenant_salt
from twofold.request import Generation
from twofold.scheduling.admission.admission import Admission, QueuedRequest
from twofold.scheduling.admission.limits import AdmissionLimits, Refusal, RefusalReason
from twofold.scheduling.cluster.forecast import ClusterForecast, Prediction
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.upstream.config import ServerConfig
from twofold.serving.upstream.kv_events import CachedBlocks, EventFeed
from twofold.serving.upstream.metrics import PrefillTotals, ServerMetrics

# Shorter prompts, mostly those of a decode server (it computes one token), measure the overhead per request and not
# the time per token.
MIN_TOKENS = 64
MEMORY_TOKENS = 16384  # maximum weight of earlier measurements
NOMINAL_S = 1e-3  # per prompt token until the first measurement; only ratios matter


class UpstreamPromptKeys:
    """Computes block keys and cache salts of prompts. Clients with different API keys share no cached prefixes."""

    def __init__(self) -> None:
        self.block_tokens = 0  # 0 until a server reports it
        self._secret = secrets.token_bytes(32)
        self._keys: dict[str, bytes] = {}  # salts of API keys, by name

    def name(self, generation: Generation) -> Generation:
        """Return a copy of the request with its block keys and its cache salt."""
        salt = self.salt(generation.key, generation.cache_salt)
        if not self.block_tokens:
            return msgspec.structs.replace(generation, cache_salt=salt)
        blocks = tuple(prefix_keys(generation.prompt_token_ids, self.block_tokens, salt.encode()))
        request = msgspec.structs.replace(generation.request, prefix_blocks=blocks)
        return msgspec.structs.replace(generation, request=request, cache_salt=salt)

    def salt(self, key: str, given: str) -> str:
        """Return the cache salt of a request with an API key and a salt of its own, either of which may be empty."""
        if not key:
            return given
        if key not in self._keys:
            self._keys[key] = tenant_salt(key, secret=self._secret)
        return tenant_salt(given, secret=self._keys[key]).hex()


class UpstreamForecast:
    """Forecast of prefill times and prefix hits, for routing to vLLM servers."""

    def __init__(self, context: "zmq.asyncio.Context", prompt_keys: UpstreamPromptKeys) -> None:
        self.forecast = ClusterForecast(PrefixIndex(), 0)
        self._context, self._prompt_keys = context, prompt_keys
        self._speeds = PrefillSpeeds()
        self._feeds: dict[str, EventFeed] = {}

    def joined(self, server: ServerConfig, load: InstanceLoad, metrics: ServerMetrics) -> None:
        """Add a server to the forecast after its start or restart, and subscribe to its KV events."""
        self.forecast.block_tokens = self._prompt_keys.block_tokens = (
            self._prompt_keys.block_tokens or metrics.block_tokens
        )
        self.forecast.join(load.id, ServerPrediction(load.id, self._speeds))
        if server.events is not None and load.id not in self._feeds:
            blocks = CachedBlocks(load.id, self.forecast.memories, self._prompt_keys.block_tokens)
            feed = self._feeds[load.id] = EventFeed(server, self._context, blocks.follow, blocks.forget)
            feed.start()

    def read(self, instance: str, metrics: ServerMetrics) -> None:
        """Update the prefill speed of a server from the server's metrics."""
        self._speeds.read(instance, metrics.prefills)

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.stop()


class PrefillSpeeds:
    """Recent prefill time of each server, in seconds per computed prompt token."""

    def __init__(self) -> None:
        self._read: dict[str, PrefillTotals] = {}
        self._counted: dict[str, PrefillTotals] = {}

    def read(self, instance: str, totals: PrefillTotals) -> None:
        """Update the speed of a server from its cumulative prefill counters."""
        new = totals.since(self._read.get(instance, PrefillTotals()))
        self._read[instance] = totals
        if new.requests <= 0 or new.tokens < MIN_TOKENS * new.requests:
            return
        before = self._counted.get(instance, PrefillTotals())
        share = MEMORY_TOKENS / max(before.tokens, MEMORY_TOKENS)
        self._counted[instance] = PrefillTotals(
            before.seconds * share + new.seconds, before.tokens * share + new.tokens
        )

    def of(self, instance: str) -> float:
        """Return the prefill time of a server in seconds per token."""
        counted = self._counted.get(instance)
        if counted is not None:
            return counted.token_s
        # Before its first prefill, assume the mean of the other servers.
        known = [each.token_s for each in self._counted.values()]
        return sum(known) / len(known) if known else NOMINAL_S


class ServerPrediction(Prediction):
    """Predicts prefill times in proportion to uncached prompt tokens."""

    def __init__(self, instance: str, speeds: PrefillSpeeds) -> None:
        self._instance, self._speeds = instance, speeds

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        return (tokens - reused) * self._speeds.of(self._instance)

    def transfer_s(self, tokens: int) -> float:
        return inf  # servers do not fetch prefixes from each other


class TtftAdmission(Admission):
    """Admission that rejects requests with a predicted TTFT over `ttft_s` seconds (Mooncake section 7.2). It requires a
    router that predicts TTFTs (`FORECASTING_ROUTERS`).
    """

    def __init__(self, limits: AdmissionLimits, cluster: ClusterScheduler, ttft_s: float) -> None:
        super().__init__(limits)
        self._cluster, self._ttft_s = cluster, ttft_s

    def judge(self, queued: QueuedRequest, now: float) -> Refusal | None:
        # Decode is not predicted, because the speed of external servers is unknown.
        placed = self._cluster.would_place(queued.request, now)
        ttft_s = None if placed is None else placed.route.ttft_s
        if ttft_s is None or ttft_s <= self._ttft_s:
            return None
        return Refusal(RefusalReason.PREFILL_LOAD, max(1, ceil(ttft_s - self._ttft_s)))
