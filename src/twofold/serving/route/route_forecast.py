"""What routers predict by: how fast servers are, by their metrics, and what they have cached, by their events."""

from math import inf

import zmq.asyncio

from twofold.instance import InstanceLoad
from twofold.kvcache.index import PrefixIndex
from twofold.scheduling.forecast import Forecast
from twofold.scheduling.prediction import Prediction
from twofold.serving.route.config import ServerConfig
from twofold.serving.route.event_feed import EventFeed
from twofold.serving.route.exposition import Prefills, Readings
from twofold.serving.route.kv_events import Changes, EventBatch, KnownBlocks
from twofold.serving.route.names import SharedNames

# Prompts of fewer tokens, those of a server that decodes above all (it computes the last one), say what a request takes
# by itself and nothing of a token.
LEAST_TOKENS = 64
MEMORY_TOKENS = 16384  # what was computed before counts as no more than these
NOMINAL_S = 1e-3  # of a prompt token, before any server has computed one: only which is faster matters


class RouteForecast:
    """Fills a `Forecast` for servers, once the first of them has said how large its blocks are.

    Each server finds what is in its own cache and nothing else: nobody can ask them to fetch from each other.
    """

    def __init__(self, context: "zmq.asyncio.Context", names: SharedNames) -> None:
        self.forecast = Forecast(PrefixIndex(), 0)
        self._context, self._names = context, names
        self._speeds = Speeds()
        self._feeds: dict[str, EventFeed] = {}

    def joined(self, server: ServerConfig, load: InstanceLoad, readings: Readings) -> None:
        """A server is there, perhaps not for the first time."""
        self.forecast.block_tokens = self._names.block_tokens = (
            self._names.block_tokens or readings.block_tokens
        )
        self.forecast.join(load.id, ServerPrediction(load.id, self._speeds))
        if server.events is not None and load.id not in self._feeds:
            blocks = _Blocks(load.id, self.forecast.memories, self._names.block_tokens)
            feed = self._feeds[load.id] = EventFeed(server, self._context, blocks.follow, blocks.forget)
            feed.start()

    def read(self, instance: str, readings: Readings) -> None:
        """A server has told how it is."""
        self._speeds.read(instance, readings.prefills)

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.stop()


class Speeds:
    """Seconds of a prompt token on each server, queues not counted, as it is of late."""

    def __init__(self) -> None:
        self._read: dict[str, Prefills] = {}
        self._counted: dict[str, Prefills] = {}

    def read(self, instance: str, told: Prefills) -> None:
        """A server tells of its prompts so far."""
        new = told.since(self._read.get(instance, Prefills()))
        self._read[instance] = told
        if new.requests <= 0 or new.tokens < LEAST_TOKENS * new.requests:
            return
        before = self._counted.get(instance, Prefills())
        share = MEMORY_TOKENS / max(before.tokens, MEMORY_TOKENS)
        self._counted[instance] = Prefills(
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

    def __init__(self, instance: str, speeds: Speeds) -> None:
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
        self._known = KnownBlocks(block_tokens)

    def follow(self, batch: EventBatch) -> None:
        for change in self._known.follow(batch):
            self._apply(change)

    def forget(self) -> None:
        """Nobody knows what it has."""
        self._known = KnownBlocks(self._block_tokens)
        self._index.lost(self._instance)

    def _apply(self, change: Changes) -> None:
        if change.cleared:
            self._index.lost(self._instance)
        self._index.removed(self._instance, change.removed)
        if change.stored:
            self._index.stored(self._instance, change.stored)
