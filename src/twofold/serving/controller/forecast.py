"""Measured speeds of KV transfers and prefills, and load forecasts for the router."""

import asyncio
from collections.abc import Collection
from functools import partial
from math import inf
from operator import attrgetter

from twofold.cluster.profiles import instance_profiles, instance_slots
from twofold.engine.base import KvLayout
from twofold.events import Route
from twofold.hardware.catalog import load_catalog
from twofold.instance import InstanceLoad
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.sharding import UNSHARDED, Sharding, layer_traffic, plan_reshard
from twofold.performance.base import PerformanceModel
from twofold.performance.transfer import LinkSpeed, PrefillSpeed, TransferModel, reshard_path
from twofold.scheduling.cluster.forecast import ClusterForecast, Prediction
from twofold.scheduling.cluster.scheduler import TransferPaths
from twofold.serving.config import ForecastConfig
from twofold.serving.messages import BlocksChanged, LinkMeasured, Registered, StoreChanged, StoreFetch

UNKNOWN_TOKENS = 512  # default crossover: Splitwise (section 6.2) on H100
NEVER = 1 << 62
UNKNOWN_BYTES_PER_S = 125e6  # default for unmeasured links between hosts: 1 Gbit/s


class MeasuredPaths(TransferPaths):
    """Speeds of links and of prefill, measured by workers."""

    def __init__(self) -> None:
        super().__init__({})
        # Measurements of a lost instance stay in use until its next process reports new ones.
        self.links: dict[tuple[str, str], LinkSpeed] = {}  # by source and target
        self.prefills: dict[str, PrefillSpeed] = {}  # by instance
        self._layout: KvLayout | None = None
        self._splits: dict[str, Sharding] = {}
        self._transfers: dict[tuple[str, str], TransferModel] = {}
        self._hosts: dict[str, str] = {}
        self._into: dict[str, TransferModel] = {}
        self._news = asyncio.Event()

    def registered(self, message: Registered) -> None:
        """Store the KV layout, sharding, host and prefill speed of a registered worker."""
        memory = message.peer.memory
        self._layout = memory.layout
        self._splits[memory.instance] = memory.sharding
        self._hosts[memory.instance] = message.peer.host
        self._transfers.clear()
        self._into.clear()
        if message.prefill is not None:
            self.prefills[memory.instance] = message.prefill
            self.crossovers.clear()

    def measured(self, message: LinkMeasured) -> None:
        pair = message.source, message.target
        self.links[pair] = message.speed
        self._news.set()
        self.crossovers.pop(message.source, None)
        self._transfers.pop(pair, None)
        self._into.clear()

    async def known(self, pairs: Collection[tuple[str, str]]) -> None:
        """Wait until the links between all (source, target) `pairs` have been measured."""
        for pair in pairs:
            while pair not in self.links:
                self._news.clear()
                await self._news.wait()

    def crossover(self, prefill: str) -> int:
        """Return the shortest prompt, in tokens, that instance `prefill` hands off layer by layer."""
        if prefill not in self.crossovers:
            self.crossovers[prefill] = self._crossover(prefill)
        return self.crossovers[prefill]

    def transfer(self, prefill: str, decode: str) -> TransferModel | None:
        pair = (prefill, decode)
        link = self.links.get(pair)
        if link is None or self._layout is None or not self.prefills:
            return None
        known = self._transfers.get(pair)
        if known is None:
            source, target = (self._splits.get(end, UNSHARDED) for end in pair)
            known = self._transfers[pair] = _path(link, self._layout, source, target)
        return known

    def into(self, host: str) -> TransferModel | None:
        """Return a model of KV transfers into `host`.

        The model uses the slowest measured link between `host` and any other host. Without measurements, the model
        assumes a link of 1 Gbit/s. Return None if no worker has registered with the service.
        """
        known = self._into.get(host)
        if known is None and self._layout is not None:
            known = self._into[host] = self._way_into(host, self._layout)
        return known

    def prefill_s(self, prefill: str, tokens: int) -> float:
        """Predict the time in seconds to prefill a prompt on an instance."""
        own = self.prefills.get(prefill)
        speeds = self.prefills.values() if own is None else (own,)  # without its own measurements, the slowest
        return max((speed.seconds(tokens) for speed in speeds), default=0.0)

    def summary(self) -> str:
        """Describe link speed, prefill speed and hand-off mode in one line; empty without measurements."""
        if not self.links or not self.prefills:
            return ""
        slowest = min(self.links.values(), key=lambda link: link.bytes_per_s)
        prefill = max(self.prefills.values(), key=lambda speed: speed.s_per_token)
        crossovers = {self.crossover(source) for source, _ in self.links}
        tokens = min(crossovers)
        mode = f"layer-wise KV transfer from {tokens:,} tokens" if tokens < NEVER else "no layer-wise KV transfer"
        return (
            f"links: {slowest.bytes_per_s / 1e9:.2g} GB/s and {slowest.overhead_s * 1e3:.2g} ms per transfer, "
            f"prefill: {prefill.s_per_token * 1e3:.2g} ms per token, {mode}"
        )

    def _way_into(self, host: str, layout: KvLayout) -> TransferModel:
        measured = [
            path
            for source, target in self.links
            if (self._hosts.get(source) == host) != (self._hosts.get(target) == host)
            and (path := self.transfer(source, target)) is not None
        ]
        if measured:
            return min(measured, key=attrgetter("bytes_per_s"))
        # Without measurements, a link of 1 Gbit/s.
        unknown = LinkSpeed(overhead_s=0.0, bytes_per_s=UNKNOWN_BYTES_PER_S)
        return unknown.transfer(layout.bytes_per_token, len(layout.layers))

    def _crossover(self, prefill: str) -> int:
        transfers = [self.transfer(source, target) for source, target in self.links if source == prefill]
        prefill_s = partial(self.prefill_s, prefill)
        found = [transfer.crossover_tokens(prefill_s) for transfer in transfers if transfer is not None]
        return min((NEVER if tokens is None else tokens for tokens in found), default=UNKNOWN_TOKENS)


def _path(link: LinkSpeed, layout: KvLayout, source: Sharding, target: Sharding) -> TransferModel:
    """Return a model of KV transfer times between two instances, based on the measured speed of their link."""
    layers = layer_traffic(plan_reshard(source, target, layout.kv_heads), len(layout.layers))
    per_head = [layout.head_bytes_per_block(layer) // layout.block_size for layer in range(len(layers))]
    layer_bytes = [way.heads * each for way, each in zip(layers, per_head, strict=True)]
    return reshard_path(link, layer_bytes, [way.pieces for way in layers])


class HostStores:
    """Index of the blocks in each host's KV store."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._epochs: dict[str, int] = {}
        self._addresses: dict[str, str | None] = {}

    def changed(self, message: StoreChanged) -> None:
        """Apply a KV store's report of stored and removed blocks."""
        if self._epochs.get(message.host) != message.epoch:
            self._epochs[message.host] = message.epoch
            self._addresses[message.host] = message.address
            self.index.lost(message.host)  # a restarted store's first report replaces its earlier blocks
        self.index.removed(message.host, message.removed)
        self.index.stored(message.host, message.stored)

    def lost(self, host: str) -> None:
        """Forget the blocks of an unreachable host's KV store."""
        self.index.lost(host)

    def address(self, host: str) -> str | None:
        """Return the address at which other hosts fetch blocks from a host's store; None if unknown."""
        return self._addresses.get(host)


class LiveForecast:
    """Load forecast for the router, updated from the reports of workers and KV stores."""

    def __init__(self, config: ForecastConfig, block_tokens: int, paths: MeasuredPaths) -> None:
        self.stores, self._paths = HostStores(), paths
        self._models = _models(config)
        self.forecast = ClusterForecast(self.stores.index, block_tokens)

    def joined(self, load: InstanceLoad, host: str) -> None:
        """Start to forecast the load of a new worker on `host`."""
        # The store of a host counts as a shared cache, from which other hosts may fetch blocks.
        load.cache = host
        model = self._models.get(load.id) or next(iter(self._models.values()), None)
        self.forecast.join(load.id, LivePrediction(load.id, host, model, self._paths, self.stores))

    def lost(self, instance: str) -> None:
        """Forget the blocks in a lost worker's engine memory."""
        self.forecast.memories.lost(instance)

    def blocks_changed(self, message: BlocksChanged) -> None:
        """Apply a worker's report of blocks stored in and removed from its engine memory."""
        self.forecast.memories.removed(message.instance, message.removed)
        self.forecast.memories.stored(message.instance, message.stored)

    def fetch_of(self, route: Route) -> StoreFetch | None:
        """Return the blocks that a route fetches from a KV store, and its address; None without either."""
        fetch = route.fetch
        address = None if fetch is None else self.stores.address(fetch.source)
        if fetch is None or address is None:
            return None
        return StoreFetch(host=fetch.source, address=address, blocks=fetch.blocks)


class LivePrediction(Prediction):
    """Predicted times for one worker to prefill prompts and to fetch KV blocks from other hosts' stores."""

    def __init__(
        self, instance: str, host: str, model: PerformanceModel | None, paths: MeasuredPaths, stores: HostStores
    ) -> None:
        self._instance, self._host = instance, host
        # Without a model, prefill times are predicted from measurements.
        self._model, self._paths, self._stores = model, paths, stores

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        # Loading blocks from the worker's own host counts as free: it takes far less time than a prefill.
        if self._model is None:
            return self._paths.prefill_s(self._instance, tokens - reused)
        return self._model.prefill_s(tokens - reused, tokens * tokens - reused * reused)

    def transfer_s(self, tokens: int) -> float:
        way = None if self._stores.address(self._host) is None else self._paths.into(self._host)
        return inf if way is None else way.serialized_s(tokens)


def _models(config: ForecastConfig) -> dict[str, PerformanceModel]:
    """Return the performance models of the configured cluster, by instance name."""
    if config.cluster is None:
        return {}
    kinds = instance_profiles(config.cluster, load_catalog(config.catalog))
    return {seat.name: seat.profile.model for seat in instance_slots(kinds)}
