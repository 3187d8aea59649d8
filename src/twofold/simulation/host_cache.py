"""The prefix cache of one machine: its blocks by tier, what loading one takes, and who is told of what it has."""

from collections.abc import Sequence
from operator import mul
from typing import Final

from twofold.errors import ConfigurationError
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.tiers import TieredCache
from twofold.kvcache.watcher import CacheWatcher, Removal
from twofold.request import BlockKey
from twofold.simulation.cache_spec import CacheSpec, room_tokens
from twofold.simulation.network import Link

BLOCK_TOKENS: Final = 512  # of the blocks that traces name


class HostCache:
    """What an instance has beside it: a `cache`, called `name`, that it may share with others on its machine.

    `block_ps` has, for each tier, the picoseconds that a block takes from there to the instance; `link` is the way of
    the machine to others.
    """

    def __init__(self, name: str, cache: TieredCache, block_ps: Sequence[int], link: Link) -> None:
        self.name = name
        self.cache = cache
        self.block_ps = tuple(block_ps)
        self.link = link

    def hold(self, keys: Sequence[BlockKey], now_s: float) -> list[int]:
        """Use the leading blocks of a prompt that are here: they stay until `release`. Returns how many by tier."""
        counts = self.cache.match(keys)
        for position in range(sum(counts)):
            self.cache.hold(keys[position])
        self.cache.touch(keys, sum(counts), now_s)
        return counts

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Blocks that were held need not stay any more."""
        for key in keys:
            self.cache.release(key)

    def loading_ps(self, counts: Sequence[int]) -> int:
        """Picoseconds of loading that many blocks of each tier."""
        return sum(map(mul, counts, self.block_ps))


def make_cache(name: str, spec: CacheSpec, prefixes: PrefixIndex, kv_bytes_per_token: int) -> TieredCache:
    """An empty one, which tells `prefixes` what it has; raises ConfigurationError where a tier holds no block."""
    watcher = _Watcher(name, prefixes)
    tiers = []
    for tier, room in spec.rooms:
        blocks = room_tokens(room, kv_bytes_per_token) // BLOCK_TOKENS
        if not blocks:
            size = f"{BLOCK_TOKENS} tokens, which are {kv_bytes_per_token * BLOCK_TOKENS:,} bytes"
            raise ConfigurationError(f"kv_cache: {tier} of {room} has no room for a block of {size}")
        tiers.append(PrefixCache(blocks, create_eviction(spec.eviction), watcher))
    return TieredCache(tiers)


class _Watcher(CacheWatcher):
    """Tells the index which blocks a cache has; what goes from one tier to another is gone for no time."""

    def __init__(self, name: str, prefixes: PrefixIndex) -> None:
        self._name, self._prefixes = name, prefixes

    def stored(self, key: BlockKey) -> None:
        self._prefixes.stored(self._name, (key,))

    def removed(self, key: BlockKey, reason: Removal) -> None:  # noqa: ARG002  (whatever it was)
        self._prefixes.removed(self._name, (key,))
