"""Prefix caches in the simulator: lookups, fetches between caches, loading during prefill, and hit statistics."""

from collections.abc import Mapping, Sequence
from operator import mul
from typing import Final

import msgspec

from twofold.cluster.spec import CacheSpec, cache_size_tokens
from twofold.cluster.timing import PS, RunTiming, nearest
from twofold.errors import ConfigurationError
from twofold.events import RequestSubscriber, Route
from twofold.kvcache.cache import CacheObserver, PrefixCache, RemovalReason
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.tiers import TieredCache
from twofold.performance.reuse import layer_wise
from twofold.request import BlockKey
from twofold.route import PrefixFetch
from twofold.scheduling.instance.queues import RunningBatch
from twofold.simulation.histogram import Histogram
from twofold.simulation.kernel import Call, EventOrder, Kernel, MachineLink, VirtualNetwork
from twofold.simulation.statistics import SimulatedRequest, Tally
from twofold.workload.blocks import session_keys

_MICRO: Final = 10**6
_HOTTEST: Final = 10
_MANY: Final = 1 << 20


class HotBlock(msgspec.Struct, frozen=True):
    """Frequently used KV block: numbers of prompts that contain it (`uses`), and of caches that have stored it."""

    uses: int
    caches: int


class ReuseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix reuse in a run: cache hits, reused tokens, hottest blocks, and errors of predicted TTFTs."""

    caches: int
    blocks: int
    hits: dict[str, int]  # blocks in the local cache, by tier
    fetched: int  # blocks from other caches
    prompt_tokens: int
    reused_tokens: int  # prompt tokens that were not computed
    requests: dict[str, int]  # prompts by prefill instance
    hottest: tuple[HotBlock, ...]  # blocks of the most prompts
    ttft_error: Histogram | None  # relative; None without predictions

    @property
    def hit_rate(self) -> float:
        """Share of prompt blocks that were found in a local or remote cache."""
        return (sum(self.hits.values()) + self.fetched) / self.blocks if self.blocks else 0.0

    @property
    def largest_share(self) -> float:
        """Share of all prompts that the busiest prefill instance received."""
        given = sum(self.requests.values())
        return max(self.requests.values()) / given if given else 0.0

    @property
    def spread(self) -> float:
        """Fraction of prefix caches that have stored a block, averaged over the most used blocks."""
        if not self.hottest:
            return 0.0
        return sum(block.caches for block in self.hottest) / (len(self.hottest) * self.caches)


class HostCache:
    """Handle with which a simulated instance accesses the prefix cache of the instance's machine.

    `block_ps` lists the time to load a block from each tier, in picoseconds; `prefills`: the instance computes prompts.
    """

    def __init__(
        self, name: str, cache: TieredCache, block_ps: Sequence[int], link: MachineLink, prefills: bool
    ) -> None:
        self.name, self.cache, self.link, self.prefills = name, cache, link, prefills
        self.block_ps = tuple(block_ps)

    def hold(self, keys: Sequence[BlockKey]) -> list[int]:
        """Pin the cached prefix of a prompt; return its number of blocks in each tier."""
        counts = self.cache.match(keys)
        for position in range(sum(counts)):
            self.cache.hold(keys[position])
        self.cache.touch(keys, sum(counts))
        return counts

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Unpin these blocks."""
        for key in keys:
            self.cache.release(key)

    def loading_ps(self, counts: Sequence[int]) -> int:
        """Return the time to load `counts[i]` blocks from each tier i, in picoseconds."""
        return sum(map(mul, counts, self.block_ps))


def make_cache(name: str, spec: CacheSpec, prefixes: PrefixIndex, kv_bytes_per_token: int) -> TieredCache:
    """Create an empty tiered cache, and track its blocks in the index `prefixes` under `name`. Raise ConfigurationError
    if a tier is too small for a block.
    """
    watcher = _Watcher(name, prefixes)
    tiers = []
    for tier, room in spec.tier_sizes:
        blocks = cache_size_tokens(room, kv_bytes_per_token) // spec.block_tokens
        if not blocks:
            size = f"{spec.block_tokens} tokens, which are {kv_bytes_per_token * spec.block_tokens:,} bytes"
            raise ConfigurationError(f"kv_cache: {tier} of {room} has no room for a block of {size}")
        tiers.append(PrefixCache(blocks, create_eviction(spec.eviction), watcher))
    return TieredCache(tiers)


class _Watcher(CacheObserver):
    """Updates the prefix index when blocks are stored in or removed from a cache."""

    def __init__(self, name: str, prefixes: PrefixIndex) -> None:
        self._name, self._prefixes = name, prefixes

    def stored(self, key: BlockKey) -> None:
        self._prefixes.stored(self._name, (key,))

    def removed(self, key: BlockKey, reason: RemovalReason) -> None:
        self._prefixes.removed(self._name, (key,))


_FETCH: Final = EventOrder.TRANSFER + (1 << 39)  # after hand-offs that land at the same time


class _Use:
    __slots__ = ("block_tokens", "fetched", "hits", "host", "keys", "life", "loading", "ttft_s")

    def __init__(self, life: SimulatedRequest, host: HostCache, block_tokens: int, ttft_s: float | None) -> None:
        # Pinned blocks of one prompt, from its placement to the end of its prefill.
        self.life = life
        self.host, self.block_tokens = host, block_tokens
        self.keys = life.request.prefix_blocks
        self.ttft_s = ttft_s
        self.hits: list[int] = []
        self.fetched = 0
        self.loading = 0  # picoseconds left

    @property
    def blocks(self) -> int:
        return sum(self.hits) + self.fetched

    @property
    def reused_tokens(self) -> int:
        return min(self.blocks * self.block_tokens, self.life.prompt_tokens - 1)


class PrefixReuse(RequestSubscriber):
    """Simulation of the prefix caches of a cluster. `hosts` has the cache of each instance's machine, by instance."""

    def __init__(
        self,
        kernel: Kernel,
        network: VirtualNetwork,
        hosts: Mapping[str, HostCache],
        cache: CacheSpec,
        kv_bytes_per_token: int,
        layers: int,
    ) -> None:
        self._kernel, self._network = kernel, network
        self._hosts = dict(hosts)
        self._by_name = {host.name: host for host in hosts.values()}
        self._uses: dict[str, _Use] = {}
        self._turns: dict[str, SimulatedRequest] = {}  # turns of sessions that decode
        self._block_tokens = cache.block_tokens
        self._block_bytes = kv_bytes_per_token * cache.block_tokens
        self._layers = layers
        self._tiers = tuple(tier for tier, _ in cache.tier_sizes)
        self._hits = [0] * len(self._tiers)
        prefilling = {instance: host.name for instance, host in hosts.items() if host.prefills}
        self._bits = {name: 1 << number for number, name in enumerate(dict.fromkeys(prefilling.values()))}
        self._requests = dict.fromkeys(prefilling, 0)
        self._blocks = self._fetched = self._prompt_tokens = self._reused_tokens = 0
        self._counts: dict[BlockKey, int] = {}  # prompts with a block
        self._where: dict[BlockKey, int] = {}  # the bits of the caches where prompts with a block were prefilled
        self._most = _MANY
        self._error = Tally()

    def cache_of(self, instance: str) -> str:
        """Return the name of an instance's cache."""
        return self._hosts[instance].name

    def submit(self, life: SimulatedRequest, route: Route) -> None:
        """Pin a placed request's cached blocks, start its prefix fetch, and submit it to its instance."""
        host = self._hosts[life.prefill.name]
        use = self._uses[life.id] = _Use(life, host, self._block_tokens, route.ttft_s)
        self._requests[life.prefill.name] += 1
        use.hits = host.hold(use.keys)
        use.loading = host.loading_ps(use.hits)
        target = self._hosts[life.decode.name]
        if life.splits and target.prefills:
            found = sum(target.cache.match(use.keys)) * self._block_tokens
            life.cached_tokens = min(found, life.prompt_tokens - 1)
        fetching = route.fetch is not None and self._fetch(use, route.fetch)
        life.prefill.scheduler.submit(
            life.request, decodes_here=not life.splits, reused_tokens=use.reused_tokens, fetching=fetching
        )

    def loading(self, iteration: RunningBatch, pace: RunTiming) -> RunTiming:
        """Return the timing of a batch that loads cached blocks layer by layer. `pace` is that without loading."""
        loading = 0
        for part in iteration.prefills:
            use = self._uses.get(part.sequence.id)
            if use is not None:
                loading += use.loading
                use.loading = 0  # loaded for the rest of the prompt too
        if not loading:
            return pace
        first = nearest(layer_wise(self._layers, float(loading), float(pace.first_ps)))
        return RunTiming(first, pace.step_ps, pace.milliwatts)

    def first_token(self, request_id: str, now: float) -> None:
        """Store the blocks of a computed prompt in the cache of its prefill instance."""
        use = self._uses.pop(request_id)
        use.host.release(use.keys[: use.blocks])
        use.host.cache.insert(use.keys)  # takes no extra time: layers are written once they are computed
        if use.life.request.session:
            self._turns[request_id] = use.life
        self._count(use)

    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        """Store the blocks of a turn, including its output, in the cache of its decode instance."""
        life = self._turns.pop(request_id, None)
        if life is not None:
            tokens = life.prompt_tokens + output_tokens - 1  # the last token has no KV
            self._hosts[life.decode.name].cache.insert(session_keys(life.request, tokens, self._block_tokens))

    def aborted(self, request_id: str, now: float) -> None:
        """Unpin the blocks of an aborted request."""
        self._turns.pop(request_id, None)
        use = self._uses.pop(request_id, None)
        if use is not None:
            use.host.release(use.keys[: use.blocks])

    def _land(self, fetched: tuple[_Use, HostCache, tuple[BlockKey, ...]]) -> None:
        use, source, keys = fetched
        source.release(keys)
        if use.life.ended:
            return
        host, start = use.host, use.blocks
        host.cache.insert(use.keys[: start + len(keys)], start)
        counts = host.hold(keys)
        use.fetched = sum(counts)
        use.loading += host.loading_ps(counts)
        use.life.prefill.scheduler.fetched(use.life.id, use.reused_tokens)
        use.life.prefill.poke()

    def _fetch(self, use: _Use, fetch: PrefixFetch) -> bool:
        source, start = self._by_name[fetch.source], use.blocks
        keys = use.keys[start : fetch.blocks]
        counts = source.hold(keys)
        keys = keys[: sum(counts)]
        if not keys:
            return False
        # Blocks on disk are read first.
        lower = source.loading_ps([0, *counts[1:]])
        landed = Call(_FETCH + use.life.number, self._land, (use, source, keys))
        size = len(keys) * self._block_bytes
        self._network.send(source.link, use.host.link, size, self._kernel.now + lower, landed)
        return True

    def _count(self, use: _Use) -> None:
        life = use.life
        self._blocks += len(use.keys)
        self._fetched += use.fetched
        self._prompt_tokens += life.prompt_tokens
        self._reused_tokens += use.reused_tokens
        for tier, blocks in enumerate(use.hits):
            self._hits[tier] += blocks
        bit, counts, where = self._bits[use.host.name], self._counts, self._where
        for key in use.keys:
            counts[key] = counts.get(key, 0) + 1
            where[key] = where.get(key, 0) | bit
        if len(counts) > self._most:
            # From here on, the hottest blocks are approximate.
            self._counts = {key: count for key, count in counts.items() if count > 1}
            self._where = {key: where[key] for key in self._counts}
            self._most = max(_MANY, 2 * len(self._counts))
        if use.ttft_s is not None:
            real_s = (life.first_token - life.arrived) / PS
            self._error.add(round(abs(use.ttft_s - real_s) / real_s * _MICRO))

    def result(self) -> ReuseResult:
        """Return the prefix reuse statistics of the whole simulation."""
        hottest = sorted(self._counts, key=lambda key: -self._counts[key])[:_HOTTEST]
        return ReuseResult(
            caches=len(self._bits),
            blocks=self._blocks,
            hits=dict(zip(self._tiers, self._hits, strict=True)),
            fetched=self._fetched,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            requests=self._requests,
            hottest=tuple(HotBlock(self._counts[key], self._where[key].bit_count()) for key in hottest),
            ttft_error=Histogram.of(self._error, 1 / _MICRO) if self._error.high >= 0 else None,
        )
