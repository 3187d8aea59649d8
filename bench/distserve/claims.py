"""Compare the goodput per GPU of disaggregated and colocated serving in simulation, as DistServe does.

For each application in figure 1 and table 1 of the paper (OSDI'24), finds the disaggregated placement with
the highest goodput per GPU, on at most as many GPUs as in the paper. Compares the placement with colocated
instances that have the paper's tensor parallelism and one of these schedulers:

- mixed: batches of decodes and whole prompts
- chunked: batches of decodes and prompt chunks
- old vLLM: the paper's baseline, which runs prefills before decodes, with the speed that the paper's authors
  measured for vLLM

Also prints how much tighter the SLO can be for the placement than for the colocated instances, at equal request
rates per GPU. Models without published profiles use a roofline estimate and are marked.

The paper publishes the mean lengths of its data sets alone. `--prompt-spread` takes another coefficient of variation of
the prompts than the assumed one (`lengths.py`).
"""

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from lengths import with_spread
from rich.console import Console
from rich.table import Table

from twofold.cli.plan.placement import search_placement
from twofold.cli.plan.settings import RunSettings
from twofold.cluster.spec import ClusterSpec
from twofold.hardware.catalog import load_catalog
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.evaluator import EvaluationStore, Evaluator, Keys
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.placement.plan import PlacementPlan, PlacementQuery, prepare
from twofold.planning.plan import DesignChoice, at_capacity
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.workload import WorkloadArguments
from twofold.slo import Slo
from twofold.workload.trace import FORMATS, write_trace

MACHINE = "dgx-a100"
CONTEXT = 2048
BETWEEN_NODES = 25e9 / 8  # the paper's testbed: 25 Gbit/s
T = TypeVar("T")
OWN, VLLM, ESTIMATED = "distserve-published", "distserve-published-vllm", "roofline"


class Application(msgspec.Struct, frozen=True):
    """One row of the paper's table 1: model, SLO, the paper's placement, and the claimed gains over vLLM."""

    name: str
    workload: str
    model: str
    ttft_s: float
    tpot_s: float
    gpus: int
    colocated_tp: int
    found: str
    claim: str
    engine: str = OWN
    arrival: str | None = None  # None: that of the workload


APPLICATIONS = (
    # Figure 1 of the paper: 512 prompt and 64 output tokens on one GPU, and on two prefill GPUs with one decode GPU.
    Application("figure 1", "512+64", "opt-13b", 0.4, 0.04, 3, 1, "2x 1,1 / 1,1", "2.1x (3.3 of 1.6)", VLLM),
    Application("chat-13b", "distserve-chat", "opt-13b", 0.25, 0.1, 3, 1, "2,1 / 1,1", "2.0-4.6x; 1.8-3.2x"),
    Application("chat-66b", "distserve-chat", "opt-66b", 2.5, 0.15, 8, 4, "4,1 / 2,2", "2.0-4.6x; 1.8-3.2x"),
    Application("chat-175b", "distserve-chat", "opt-175b", 4.0, 0.2, 21, 8, "3,3 / 4,3", "2.0-4.6x; 1.8-3.2x"),
    Application("code-66b", "distserve-code", "opt-66b", 0.125, 0.2, 8, 4, "4,1 / 2,2", "5.7x; 1.4x"),
    Application("summaries-66b", "distserve-summaries", "opt-66b", 15.0, 0.15, 8, 4, "4,1 / 2,2", "4.3x; 12.6x"),
)


def spread(one: Application, variation: float, folder: Path) -> Application:
    """Return an application with the given coefficient of variation of the prompts; figure 1 has equal prompts."""
    if not one.workload.startswith("distserve"):
        return one
    trace = folder / f"{one.name}.jsonl"
    write_trace(with_spread(one.workload, variation), trace, FORMATS["twofold"])
    return msgspec.structs.replace(one, workload=str(trace), arrival="poisson")


def problem(one: Application, performance: str, requests: int) -> Problem:
    return Problem(
        template=ClusterSpec(
            pools=(),
            model=one.model,
            performance=performance,
            router="jsq",
            handoff="by-size",
            link_bytes_per_s=BETWEEN_NODES,
        ),
        workload=WorkloadArguments(
            workload=one.workload, arrival=one.arrival, duration_s=1.0, min_requests=requests, max_model_len=CONTEXT
        ),
        slo=Slo(ttft_s=one.ttft_s, tpot_s=one.tpot_s),
        catalog=load_catalog(),
    )


def colocated(
    what: Problem, tensor_parallel: int, ways: Sequence[tuple[str, int | None]], where: RunSettings, grid: RateGrid
) -> list[DesignChoice | None]:
    """Return the goodput of one colocated instance with each batcher; None for a batcher that never meets the SLO."""
    kind = what.instance(MACHINE, tensor_parallel)
    designs = [
        Design(family=Family(kinds=(kind,), batcher=batcher, max_num_batched_tokens=budget), counts=(1,))
        for batcher, budget in ways
    ]

    async def all_of_them(search: RateSearch) -> list[DesignChoice | None]:
        told = await asyncio.gather(*(search.highest(design) for design in designs))
        return [at_capacity(each) for each in told]

    return _search(what, where, grid, all_of_them)


def tightest(what: Problem, design: Design, rate: float, where: RunSettings, grid: RateGrid) -> float | None:
    """Return the smallest multiple of the SLO that `design` meets at `rate` requests per second."""

    async def one(search: RateSearch) -> float | None:
        return (await search.evaluate(Trial(design, rate))).slo_scale

    return _search(what, where, grid, one)


def _search(what: Problem, where: RunSettings, grid: RateGrid, ask: Callable[[RateSearch], Awaitable[T]]) -> T:
    async def asked(search: RateSearch) -> T:
        return await ask(search)

    with EvaluationStore(where.store) as store, LocalExecutor(what, cores()) as executor:
        evaluator = Evaluator(executor, store, Keys(what).of)
        return asyncio.run(asked(RateSearch(evaluate=evaluator, bound=AnalyticBounds(what), grid=grid)))


def degrees(plan: PlacementPlan) -> str:
    """Format (tensor, pipeline) parallelism of prefill and decode as in the paper, such as `2,1 / 1,1`."""
    return " / ".join(f"{kind.tensor_parallel},{kind.pipeline_parallel}" for kind in plan.best.design.family.kinds)


def row(one: Application, requests: int, grid: RateGrid, where: RunSettings) -> list[str]:
    published = one.model != "opt-175b"
    what = problem(one, one.engine if published else ESTIMATED, requests)
    plan, effort = search_placement(prepare(what, PlacementQuery(stock={MACHINE: one.gpus})), grid, where)
    ways = (("mixed", None), ("chunked-prefill", 512))
    others = [(what, each) for each in colocated(what, one.colocated_tp, ways, where, grid)]
    if published:
        slower = problem(one, VLLM, requests)
        baseline = colocated(slower, one.colocated_tp, (("prefill-first", None),), where, grid)
        others += [(slower, each) for each in baseline]
    cells = [one.name + ("" if published else " (estimated)"), one.found, degrees(plan)]
    cells.append(f"{plan.best.per_accelerator:.3g}")
    for _, other in others:
        if other is None:
            cells.append("cannot")
            continue
        gain = plan.best.per_accelerator / other.per_accelerator
        share = other.per_accelerator * plan.best.design.accelerators
        scale = tightest(what, plan.best.design, share, where, grid)
        tighter = "-" if not scale else f"{1 / scale:.2f}x"
        cells.append(f"{gain:.2f}x ({other.per_accelerator:.3g}); {tighter}")
    cells += ["-"] * (3 - len(others))
    return [*cells, one.claim, f"{effort.simulations:,}; {effort.requests:,}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--only", action="append")
    parser.add_argument("--prompt-spread", type=float, help="coefficient of variation of prompt lengths")
    flags = parser.parse_args()
    table = Table(title="Goodput per GPU and SLO tightness of the best placement, as multiples of colocated ones")
    for heading in (
        "application",
        "paper's placement",
        "found",
        "req/s per GPU",
        "against mixed",
        "against chunked",
        "against old vLLM",
        "paper claims",
        "simulations; requests",
    ):
        table.add_column(heading)
    with tempfile.TemporaryDirectory() as directory:
        where = RunSettings(store=Path(directory, "claims.sqlite"))
        for each in APPLICATIONS:
            one = each if flags.prompt_spread is None else spread(each, flags.prompt_spread, Path(directory))
            if not flags.only or one.name in flags.only:
                table.add_row(*row(one, flags.requests, RateGrid(flags.tolerance), where))
                Console(stderr=True).print(f"{one.name} done")
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
