"""Compare prefill TTFT for batch token budgets below, at and above the saturation length L_m.

L_m is the length in tokens of the shortest prompt that reaches 90% of the peak token rate. The script
simulates prefill on one DGX-A100 with the iteration times of DistServe's simulator. Prompt lengths are
chat-like (log-normal, median 220 tokens). The request rates are 30% to 95% of the prefill capacity.
The prefill capacity is the number of requests per second if every batch has L_m tokens.
"""

import argparse
import random
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import SATURATING, ClusterSpec, PoolSpec
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.instance import Role
from twofold.request import Request
from twofold.simulation.result import SimulationResult
from twofold.simulation.simulate import simulate

MEDIAN, SIGMA, MOST, OUTPUT = 220, 0.9, 2048, 2
SHARES = (0.3, 0.6, 0.8, 0.9, 0.95)
OTHERS = (1, 128, 2048, 8192)


def requests(rate: float, count: int, seed: int) -> list[Request]:
    draw, now, made = random.Random(seed), 0.0, list[Request]()
    for number in range(count):
        now += draw.expovariate(rate)
        prompt = min(MOST - OUTPUT, max(1, round(MEDIAN * draw.lognormvariate(0, SIGMA))))
        made.append(Request(id=str(number), arrival_s=now, prompt_tokens=prompt, output_tokens=OUTPUT))
    return made


def cluster(model: str, budget: int | str) -> ClusterSpec:
    pools = tuple(
        PoolSpec(machines=1, machine="dgx-a100", role=role, tensor_parallel=1) for role in (Role.PREFILL, Role.DECODE)
    )
    return ClusterSpec(
        pools=pools,
        model=model,
        performance="distserve-published",
        router="round-robin",
        handoff="layer-wise",
        contention=False,
        max_num_batched_tokens=SATURATING if budget == SATURATING else int(budget),
    )


def run(model: str, budget: int | str, rate: float, count: int, seed: int, catalog: Catalog) -> SimulationResult:
    spec = cluster(model, budget)
    return simulate(spec, requests(rate, count, seed), catalog=catalog, series=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="opt-13b")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    catalog = load_catalog()
    kind = instance_profiles(cluster(given.model, SATURATING), catalog)[0]
    instances, mean = kind.layout.instances, sum(r.prompt_tokens for r in requests(1.0, 4000, 0)) / 4000
    together = round(kind.max_num_batched_tokens / mean)  # prompts per batch
    best = instances * together / kind.model.prefill_s(round(together * mean), together * round(mean) ** 2)
    table = Table(
        title=f"mean / P90 TTFT in ms, {given.model}, L_m = {kind.max_num_batched_tokens} tokens", title_justify="left"
    )
    budgets = sorted((*OTHERS, kind.max_num_batched_tokens))
    for heading in ("load", "requests/s", *(f"{budget:,}" for budget in budgets)):
        table.add_column(heading, justify="right")
    for share in SHARES:
        cells = []
        for budget in budgets:
            ttft = run(given.model, budget, share * best, given.requests, given.seed, catalog).ttft_s
            cells.append(f"{(ttft.mean or 0) * 1e3:.0f} / {(ttft.percentile(90) or 0) * 1e3:.0f}")
        table.add_row(f"{share:.0%}", f"{share * best:.1f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
