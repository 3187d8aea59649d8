"""Measure the CPU time of routing decisions, and of gateway and controller per request and per token.

Routing decisions are timed in a cluster of 40 or 1,000 instances with eight requests per instance on average.
The oldest request finishes before each decision, so the number of requests stays constant. Gateway and
controller are timed in an emulated service of 40 instances. The CPU time per token is the difference between
requests of 150 output tokens and of one output token, divided by 149. A plain Python loop is also timed, to
compare machines.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from decision_cost import cpu_seconds, decisions_per_s, reference_loop
from twofold.bench.endpoint import discover
from twofold.bench.services import served
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.reporting.output import json_text
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import ROUTERS

CLUSTER = """
model: llama2-70b
router: jsq
pools:
  - {machines: 20, machine: dgx-h100, role: prefill}
  - {machines: 20, machine: dgx-h100, role: decode}
"""
LONG = 150
AT_ONCE = 40


def rate_of(router: str, instances: int, decisions: int) -> float:
    """Return how many routing decisions `router` makes per CPU second in a cluster of `instances` instances."""
    cluster = ClusterScheduler(ROUTERS[router](), FixedHandoff(HandoffMode.LAYER_WISE))
    for number in range(instances):
        role = Role.PREFILL if number % 2 else Role.DECODE
        cluster.add_instance(f"{role.value}-{number}", role, 200_000)
    return decisions_per_s(cluster, decisions, held=8 * instances)


async def streams(url: str, count: int, tokens: int) -> int:
    """Run `count` streams of `tokens` tokens each, and return the number of received tokens."""
    endpoint = await discover(url)
    slots = asyncio.Semaphore(AT_ONCE)
    body = {"model": endpoint.model, "prompt": [5] * 200, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:

        async def one() -> int:
            async with slots, session.post(f"{url}/v1/completions", json=body) as response:
                return (await response.read()).count(b'"choices":[{')

        return sum(await asyncio.gather(*(one() for _ in range(count))))


def service_cost(requests: int) -> tuple[float, float]:
    """Return the CPU seconds of gateway and controller for a request of one token, and for each later token."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(CLUSTER)
        with served(None, ["--engine", "emulated", "--cluster", str(file)]) as url:
            (gateway,) = psutil.Process().children()

            def cost(count: int, tokens: int) -> tuple[float, int]:
                before = gateway.cpu_times()
                came = asyncio.run(streams(url, count, tokens))
                after = gateway.cpu_times()
                return after.user + after.system - before.user - before.system, came

            cost(20, 5)  # warm-up
            short_s, short = cost(requests, 1)
            long_s, long = cost(requests // 2, LONG)
    each = short_s / requests
    if short != requests or long != requests // 2 * LONG:
        raise SystemExit(f"{short} and {long} tokens arrived, but {requests} and {requests // 2 * LONG} were requested")
    return each, (long_s - each * (requests // 2)) / (long - requests // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=40_000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path, help="file for all results")
    args = parser.parse_args()
    loops = [cpu_seconds(reference_loop) for _ in range(3)]
    table = Table(title="Per core of this machine", title_justify="left")
    for column in ("what", "each", "a CPU second"):
        table.add_column(column, justify="left" if column == "what" else "right")
    decisions: dict[str, float] = {}  # seconds, by router and number of instances
    for router in ("jsq", "splitwise"):
        for instances in (40, 1000):
            rate = rate_of(router, instances, args.decisions)
            decisions[f"{router} {instances}"] = 1 / rate
            table.add_row(
                f"routing decision, {router}, {instances:,} instances", f"{1e6 / rate:.1f} µs", f"{rate:,.0f}"
            )
    request_s, token_s = service_cost(args.requests)
    table.add_row("request through gateway and controller", f"{request_s * 1e6:,.0f} µs", f"{1 / request_s:,.0f}")
    table.add_row("streamed token through gateway and controller", f"{token_s * 1e6:,.0f} µs", f"{1 / token_s:,.0f}")
    loops.append(cpu_seconds(reference_loop))
    table.add_row(
        "a million iterations of a plain loop", f"{min(loops) * 1e3:.1f} ms (at most {max(loops) * 1e3:.1f})", ""
    )
    Console(width=110).print(table)
    if args.json is not None:
        found = {"decision_s": decisions, "request_s": request_s, "token_s": token_s, "loop_s": min(loops)}
        args.json.write_text(json_text(found), "utf-8")


if __name__ == "__main__":
    main()
