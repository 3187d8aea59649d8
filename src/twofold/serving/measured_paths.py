"""The paths of a live service, as its workers measured them."""

import asyncio
from collections.abc import Collection
from operator import attrgetter

from twofold.engine.base import KvLayout
from twofold.kvcache.reshard import plan_reshard, traffic
from twofold.kvcache.split import UNSPLIT, Split
from twofold.performance.measured import LinkSpeed, PrefillSpeed
from twofold.performance.reshard_cost import reshard_path
from twofold.performance.transfer import TransferModel
from twofold.scheduling.handoffs import Paths
from twofold.serving.messages import LinkMeasured, Registered

UNKNOWN_TOKENS = 512  # where nothing is measured yet: the crossover of Splitwise (section 6.2) on its H100s
NEVER = 1 << 62
UNKNOWN_BYTES_PER_S = 125e6  # a link between hosts that nobody measured: an ordinary one of 1 Gbit/s


class MeasuredPaths(Paths):
    """Links by (source, target), prefill speeds by instance. What a lost instance measured stands until it is back."""

    def __init__(self) -> None:
        self.links: dict[tuple[str, str], LinkSpeed] = {}
        self.prefills: dict[str, PrefillSpeed] = {}
        self._layout: KvLayout | None = None
        self._splits: dict[str, Split] = {}
        self._crossovers: dict[str, int] = {}
        self._transfers: dict[tuple[str, str], TransferModel] = {}
        self._hosts: dict[str, str] = {}
        self._into: dict[str, TransferModel] = {}
        self._news = asyncio.Event()

    def registered(self, message: Registered) -> None:
        """A worker says how fast it prefills, if it does."""
        memory = message.peer.memory
        self._layout = memory.layout
        self._splits[memory.instance] = memory.split
        self._hosts[memory.instance] = message.peer.host
        self._transfers.clear()
        self._into.clear()
        if message.prefill is not None:
            self.prefills[memory.instance] = message.prefill
            self._crossovers.clear()

    def measured(self, message: LinkMeasured) -> None:
        """A worker says what the link to a peer carries."""
        pair = message.source, message.target
        self.links[pair] = message.speed
        self._news.set()
        self._crossovers.pop(message.source, None)  # no other's: there are as many messages as pairs
        self._transfers.pop(pair, None)
        self._into.clear()

    async def known(self, pairs: Collection[tuple[str, str]]) -> None:
        """Wait until all these links are measured."""
        for pair in pairs:
            while pair not in self.links:
                self._news.clear()
                await self._news.wait()

    def crossover(self, prefill: str) -> int:
        """That of its slowest link: the shortest of all, so that no transfer stays visible without need."""
        known = self._crossovers.get(prefill)
        if known is None:
            known = self._crossovers[prefill] = self._crossover(prefill)
        return known

    def transfer(self, prefill: str, decode: str) -> TransferModel | None:
        pair = (prefill, decode)
        link = self.links.get(pair)
        if link is None or self._layout is None or not self.prefills:
            return None
        known = self._transfers.get(pair)
        if known is None:
            source, target = (self._splits.get(end, UNSPLIT) for end in pair)
            known = self._transfers[pair] = _path(link, self._layout, source, target)
        return known

    def into(self, host: str) -> TransferModel | None:
        """The slowest way that was measured between a host and others; None before any worker was there."""
        known = self._into.get(host)
        if known is None and self._layout is not None:
            known = self._into[host] = self._way_into(host, self._layout)
        return known

    def prefill_s(self, prefill: str, tokens: int) -> float:
        """What another measured does for one that was not: all run the same model."""
        own = self.prefills.get(prefill)
        speeds = self.prefills.values() if own is None else (own,)
        return max((speed.seconds(tokens) for speed in speeds), default=0.0)

    def summary(self) -> str:
        """What was measured, in a line for people; empty where nothing was."""
        if not self.links or not self.prefills:
            return ""
        slowest = min(self.links.values(), key=lambda link: link.bytes_per_s)
        prefill = max(self.prefills.values(), key=lambda speed: speed.s_per_token)
        crossovers = {self.crossover(source) for source, _ in self.links}
        tokens = min(crossovers)
        by_layer = f"by layer from {tokens:,} tokens" if tokens < NEVER else "never by layer"
        return (
            f"links carry {slowest.bytes_per_s / 1e9:.2g} GB/s at {slowest.overhead_s * 1e3:.2g} ms a transfer, "
            f"a prefill takes {prefill.s_per_token * 1e3:.2g} ms a token: KV pays {by_layer}"
        )

    def _way_into(self, host: str, layout: KvLayout) -> TransferModel:
        crossing = [
            self.transfer(source, target)
            for source, target in self.links
            if (self._hosts.get(source) == host) != (self._hosts.get(target) == host)
        ]
        measured = [way for way in crossing if way is not None]
        if measured:
            return min(measured, key=attrgetter("bytes_per_s"))
        unknown = LinkSpeed(overhead_s=0.0, bytes_per_s=UNKNOWN_BYTES_PER_S)
        return unknown.transfer(layout.bytes_per_token, len(layout.layers))

    def _crossover(self, prefill: str) -> int:
        transfers = [self.transfer(source, target) for source, target in self.links if source == prefill]
        found = [
            NEVER if tokens is None else tokens
            for transfer in transfers
            if transfer is not None
            for tokens in (transfer.crossover_tokens(lambda tokens: self.prefill_s(prefill, tokens)),)
        ]
        return min(found, default=UNKNOWN_TOKENS)


def _path(link: LinkSpeed, layout: KvLayout, source: Split, target: Split) -> TransferModel:
    """What the ranks of both ends make of a link between two of them."""
    layers = traffic(plan_reshard(source, target, layout.kv_heads), len(layout.layers))
    per_head = [layout.head_bytes_per_block(layer) // layout.block_size for layer in range(len(layers))]
    layer_bytes = [way.heads * each for way, each in zip(layers, per_head, strict=True)]
    return reshard_path(link, layer_bytes, [way.pieces for way in layers])
