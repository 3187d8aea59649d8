"""Measure hit rate and CPU cost of the prefix cache on a trace, by capacity and eviction policy.

The trace must contain block keys. The default trace is Mooncake's conversation trace, for which published hit
rates are shown too. CPU costs exclude reading the trace. A plain Python loop is also timed, to compare
machines.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from twofold.bench.real_data import find_data
from twofold.errors import UserError
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import EVICTIONS, create_eviction
from twofold.planning.capacity.replay import replay_prompt
from twofold.request import Request
from twofold.workload.trace import open_trace

sys.path.append(str(Path(__file__).parents[1]))
from decision_cost import LOOP_ITERATIONS, cpu_seconds, reference_loop

NAME = "mooncake-conversation.jsonl"
HIGHEST = 36.64  # percent of repeated blocks
FIGURES = {  # hit rate in percent, by policy and capacity in blocks
    "lru": {1_000: 4.45, 3_000: 6.50, 5_000: 11.04, 10_000: 21.12, 30_000: 32.57, 50_000: 35.46, 100_000: 36.37},
    "lfu": {10_000: 13.15, 30_000: 27.55, 50_000: 34.38},
}


def replay(requests: Sequence[Request], cache: PrefixCache) -> None:
    for request in requests:
        replay_prompt(cache, request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--eviction", nargs="+", choices=tuple(EVICTIONS), default=tuple(EVICTIONS))
    parser.add_argument("--capacity", nargs="+", type=int, help="in blocks")
    args = parser.parse_args()
    if min(args.capacity or [1]) < 1:
        parser.error("--capacity: must be at least one block")
    trace = args.trace or find_data(f"traces/{NAME}")
    if trace is None:
        raise SystemExit(f"{NAME} is missing: set TWOFOLD_DATA to the folder with traces/, or name a trace")
    try:
        requests = list(open_trace(trace))
    except UserError as error:
        raise SystemExit(str(error)) from error
    blocks = sum(len(request.prefix_blocks) for request in requests)
    if not blocks:
        raise SystemExit(f"{trace} has no prefix blocks")
    distinct = len({key for request in requests for key in request.prefix_blocks})
    known = FIGURES if trace.name == NAME else {}
    loops = [cpu_seconds(reference_loop) for _ in range(3)]
    rows: list[tuple[str, int, float | None, float, float]] = []
    spent = 0.0
    for eviction in args.eviction:
        for capacity in args.capacity or tuple(FIGURES["lru"]):
            cache = PrefixCache(capacity, create_eviction(eviction))
            cpu_s = cpu_seconds(partial(replay, requests, cache))
            figure = known.get(eviction, {}).get(capacity)
            rows.append((eviction, capacity, figure, 100 * cache.hits / blocks, cpu_s))
            spent += cpu_s
    loops += [cpu_seconds(reference_loop) for _ in range(3)]
    turn_s = min(loops) / LOOP_ITERATIONS
    table = Table(
        title=f"{trace.name}: {len(requests):,} requests, {blocks:,} blocks, {distinct:,} distinct\n"
        f"highest possible reuse {1 - distinct / blocks:.2%}" + (f" (published {HIGHEST}%)" if known else ""),
        title_justify="left",
    )
    for heading in ("eviction", "blocks", "published", "ours", "blocks a CPU s", "turns a block"):
        table.add_column(heading, justify="left" if heading == "eviction" else "right")
    for eviction, capacity, figure, ours, cpu_s in rows:
        table.add_row(
            eviction,
            f"{capacity:,}",
            "" if figure is None else f"{figure:.2f}%",
            f"{ours:.2f}%",
            f"{blocks / cpu_s:,.0f}",
            f"{cpu_s / blocks / turn_s:.0f}",
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"All: {len(rows) * blocks / spent:,.0f} blocks per CPU second. A plain loop makes {1 / turn_s:,.0f} "
        f"iterations per CPU second (a million took {min(loops) * 1e3:.1f} ms, at most {max(loops) * 1e3:.1f})."
    )


if __name__ == "__main__":
    main()
