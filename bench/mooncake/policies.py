"""Compare Mooncake's Conductor with random, load-balancing and local-prefix routing by simulating Mooncake's trace.

Eight prefill and eight decode instances, one machine each, run a model of the size of LLaMA2-70B, with roofline
estimates of times. Prefill instances cache prompt KV in their machine's memory. Links of 100 GB/s carry hand-offs and
transfers between caches. Prints TTFT, cache hits, the busiest instance's share of prompts, and the replication of the
ten hottest blocks. Exits with 1 if a claim about these figures does not hold.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.real_data import find_data
from twofold.cluster.spec import CacheSpec, ClusterSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.request import Request
from twofold.simulation.result import SimulationResult
from twofold.simulation.reuse import ReuseResult
from twofold.simulation.simulate import simulate
from twofold.workload.trace import open_trace

NAME = "mooncake-conversation.jsonl"
POLICIES = ("random", "load", "local-prefix", "conductor")  # slowest first
MARGIN = 0.05  # required improvement over the previous policy
MOST, WIDE = 0.20, 0.5
LINK_BYTES_PER_S = 100e9
HEADINGS = ("policy", "mean TTFT", "P90", "P99", "found", "fetched", "reused tokens", "busiest", "spread", "CPU s")


def cluster(router: str, given: argparse.Namespace) -> ClusterSpec:
    pools = tuple(
        PoolSpec(machines=given.instances, machine=given.machine, role=role) for role in (Role.PREFILL, Role.DECODE)
    )
    return ClusterSpec(
        pools=pools,
        model=given.model,
        performance="roofline",
        router=router,
        kv_cache=CacheSpec(dram=given.room, eviction=given.eviction),
        link_bytes_per_s=LINK_BYTES_PER_S,
    )


def claims(results: dict[str, SimulationResult]) -> Iterator[tuple[str, bool]]:
    """Yield each claim about the routing policies as a pair: a sentence with results, and whether the claim holds."""
    means = {policy: result.ttft_s.mean or 0.0 for policy, result in results.items()}
    for slower, quicker in pairwise(POLICIES):
        gain = 1.0 - means[quicker] / means[slower]
        yield f"{quicker} is {gain:.1%} quicker than {slower} (at least {MARGIN:.0%})", gain >= MARGIN
    reuse = reuse_of(results["conductor"])
    share = reuse.largest_share
    yield f"conductor gives no instance more than {share:.1%} of the requests ({MOST:.0%})", share <= MOST
    narrowest = min(block.caches for block in reuse.hottest)
    text = f"the ten hottest blocks are each in {narrowest} of {reuse.caches} caches or more (most of them)"
    yield text, narrowest > WIDE * reuse.caches


def reuse_of(result: SimulationResult) -> ReuseResult:
    if result.reuse is None:
        raise SystemExit("the cluster had no caches")
    return result.reuse


def row(policy: str, result: SimulationResult) -> list[str]:
    reuse, ttft = reuse_of(result), result.ttft_s
    return [
        policy,
        *(f"{value or 0.0:.2f} s" for value in (ttft.mean, ttft.percentile(90), ttft.percentile(99))),
        f"{sum(reuse.hits.values()) / reuse.blocks:.1%}",
        f"{reuse.fetched / reuse.blocks:.1%}",
        f"{reuse.reused_tokens / reuse.prompt_tokens:.1%}",
        f"{reuse.largest_share:.1%}",
        f"{reuse.spread * reuse.caches:.1f} of {reuse.caches}",
        f"{result.cpu_s:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--machine", default="dgx-a100")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--room", default="3000000 tokens")
    parser.add_argument("--eviction", default="lru")
    parser.add_argument("--requests", type=int, help="number of requests")
    parser.add_argument("--load", type=float, default=1.0, help="factor on the rate of the trace")
    given = parser.parse_args()
    trace = given.trace or find_data(f"traces/{NAME}")
    if trace is None:
        raise SystemExit(f"{NAME} is missing: set TWOFOLD_DATA to the folder with traces/, or name a trace")
    requests: list[Request] = [
        msgspec.structs.replace(request, arrival_s=request.arrival_s / given.load)
        for request in list(open_trace(trace))[: given.requests]
    ]
    catalog = load_catalog()
    machines = f"{given.instances} + {given.instances} × {given.machine}"
    title = f"{len(requests):,} requests, {machines}, {given.model}, {given.room}"
    table = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    results = {}
    for policy in POLICIES:
        result = results[policy] = simulate(cluster(policy, given), requests, catalog=catalog, series=False)
        table.add_row(*row(policy, result))
    console = Console()
    console.print(table)
    found = list(claims(results))
    for text, holds in found:
        console.print(f"{'yes' if holds else 'NO '}  {text}", highlight=False)
    if not all(holds for _, holds in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
