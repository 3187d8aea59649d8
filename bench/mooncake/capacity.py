"""Compare two computations of LRU hit rates by cache size: one pass over a trace, and a simulation for each size.

The simulation runs the service's prefix cache. Also compares one cache shared by all nodes with a separate cache on
each node under round-robin routing, as in Mooncake (FAST'25). Each node has memory for `--tokens` tokens.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from twofold.bench.real_data import find_data
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.planning.capacity.curve import NEVER, least_capacities
from twofold.request import BlockKey
from twofold.workload.blocks import BLOCK_TOKENS
from twofold.workload.trace import open_trace

PUBLISHED = {
    1_000: 4.45, 3_000: 6.50, 5_000: 11.04, 10_000: 21.12, 30_000: 32.57, 50_000: 35.46, 100_000: 36.37,
}  # fmt: skip
NODES = (1, 2, 4, 8, 10, 16, 20)

Prompts = Sequence[Sequence[BlockKey]]


def replayed(prompts: Prompts, capacity: int) -> float:
    """Return the prefix hit rate of a simulated LRU cache of `capacity` blocks."""
    cache = PrefixCache(capacity, create_eviction("lru"))
    for prompt in prompts:
        count = cache.match(prompt)
        cache.touch(prompt, count)
        cache.insert(prompt, start=count)
    return cache.hits / (cache.hits + cache.misses)


def hit_rates(prompts: Prompts) -> Table:
    start = time.process_time()
    least = least_capacities(prompts)
    once = time.process_time() - start
    table = Table(title=f"LRU hit rates; one pass over {len(least):,} blocks: {once:.2f} CPU s", title_justify="left")
    for heading in ("blocks", "published", "one pass", "replayed", "CPU s"):
        table.add_column(heading, justify="right")
    for capacity, published in PUBLISHED.items():
        start = time.process_time()
        found = replayed(prompts, capacity)
        spent = time.process_time() - start
        one_pass = float((least <= capacity).mean())
        table.add_row(f"{capacity:,}", f"{published:.2f}%", f"{one_pass:.2%}", f"{found:.2%}", f"{spent:.2f}")
    table.add_row("any", "36.64%", f"{float((least < NEVER).mean()):.2%}", "", "")
    return table


def pooling(prompts: Prompts, tokens: int) -> Table:
    blocks = tokens // BLOCK_TOKENS
    table = Table(title=f"{tokens:,} tokens a node: {blocks:,} blocks", title_justify="left")
    for heading in ("nodes", "separate caches", "one pool", "ratio"):
        table.add_column(heading, justify="right")
    whole = least_capacities(prompts)
    for nodes in NODES:
        parts = [least_capacities(prompts[start::nodes]) for start in range(nodes)]
        local = sum(int((part <= blocks).sum()) for part in parts) / len(whole)
        pool = float((whole <= blocks * nodes).mean())
        table.add_row(f"{nodes}", f"{local:.2%}", f"{pool:.2%}", f"{pool / local:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, default=find_data("traces/mooncake-conversation.jsonl"))
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--requests", type=int, help="number of requests (default: all)")
    args = parser.parse_args()
    if args.trace is None:
        parser.error("set TWOFOLD_DATA to the folder with traces/, or give --trace")
    prompts = [request.prefix_blocks for request in islice(open_trace(args.trace), args.requests)]
    console = Console(width=120)
    console.print(hit_rates(prompts))
    console.print(pooling(prompts, args.tokens))


if __name__ == "__main__":
    main()
