"""Hit rates of a trace in simulated prefix caches of several capacities and eviction policies."""

from collections.abc import Iterable, Sequence

import msgspec

from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.request import BlockKey, Request


class HitRate(msgspec.Struct, frozen=True, kw_only=True):
    """Hits and evictions of a simulated prefix cache of `capacity` blocks."""

    eviction: str
    capacity: int
    hits: int
    evicted: int
    rate: float  # share of blocks that hit


class TraceReuse(msgspec.Struct, frozen=True, kw_only=True):
    """Highest possible hit rate of a trace, and hit rates in simulated prefix caches."""

    requests: int
    blocks: int
    distinct_blocks: int
    highest: float | None  # share of blocks seen earlier in the trace; None without blocks
    caches: tuple[HitRate, ...]


def trace_reuse(requests: Iterable[Request], capacities: Sequence[int], evictions: Sequence[str]) -> TraceReuse:
    """Replay a trace through simulated prefix caches, one for each capacity (in blocks) and eviction policy. Raises
    ConfigurationError for an unknown policy.
    """
    caches = {
        (name, capacity): PrefixCache(capacity, create_eviction(name)) for name in evictions for capacity in capacities
    }
    distinct: set[BlockKey] = set()
    count = blocks = 0
    for request in requests:
        count += 1
        blocks += len(request.prefix_blocks)
        distinct.update(request.prefix_blocks)
        for cache in caches.values():
            replay_prompt(cache, request)
    return TraceReuse(
        requests=count,
        blocks=blocks,
        distinct_blocks=len(distinct),
        highest=1 - len(distinct) / blocks if blocks else None,
        caches=tuple(
            HitRate(
                eviction=name,
                capacity=capacity,
                hits=cache.hits,
                evicted=sum(cache.removals.values()),
                rate=cache.hits / blocks if blocks else 0.0,
            )
            for (name, capacity), cache in caches.items()
        ),
    )


def replay_prompt(cache: PrefixCache, request: Request) -> int:
    """Look up a prompt's blocks in the cache, insert the missing blocks, and return the number of hits."""
    keys = request.prefix_blocks
    found = cache.match(keys)
    cache.touch(keys, found)
    cache.insert(keys, found)
    return found
