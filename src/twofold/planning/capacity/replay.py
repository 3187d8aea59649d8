"""How much of the prompts of a trace one cache would have had: by its size and its eviction rule."""

from collections.abc import Iterable, Sequence

import msgspec

from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.request import BlockKey, Request


class HitRate(msgspec.Struct, frozen=True, kw_only=True):
    """What one cache did: `hits` of all prefix blocks were in it, `evicted` had to go for others."""

    eviction: str
    capacity: int
    hits: int
    evicted: int
    rate: float


class TraceReuse(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix blocks of a trace, and what caches would have had of them; rates are shares of all blocks.

    `highest` is the share of blocks that came before, None where the trace names none.
    """

    requests: int
    blocks: int
    distinct_blocks: int
    highest: float | None
    caches: tuple[HitRate, ...]


def trace_reuse(
    requests: Iterable[Request], capacities: Sequence[int], evictions: Sequence[str]
) -> TraceReuse:
    """Replay a trace through a cache of each capacity (in blocks) by each rule, all in one pass.

    Raises ConfigurationError for a rule that is not known.
    """
    caches = {
        (name, capacity): PrefixCache(capacity, create_eviction(name))
        for name in evictions
        for capacity in capacities
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
    """What a prefill does to a cache: use the leading blocks that are there, and store the others.

    Returns how many it used.
    """
    keys = request.prefix_blocks
    found = cache.match(keys)
    cache.touch(keys, found)
    cache.insert(keys, found)
    return found
