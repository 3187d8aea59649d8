"""Check the promises of plans on the part of a trace that they have not seen.

Each plan uses the first half of a trace, or with --split blocks a random half of its blocks of three minutes, another
for each plan. Its best design is then simulated on the other half, at the mean rate of the plan. Prints how many plans
meet their SLO there, and how much higher a rate the same design could have promised: the cost of the confidence and of
the difference between the halves.

    python bench/planning/promises.py --plans 40 --jobs 2

Needs the traces of the data directory (TWOFOLD_DATA).
"""

import argparse
import asyncio
import math
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.real_data import data_folder
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Budget
from twofold.planning.evaluator import EvaluationStore, Evaluator, Keys
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.plan import DesignChoice, PlanQuery, make_plan
from twofold.planning.problem import SPLIT_ROUTERS, Problem, parse_families, with_parallelism
from twofold.planning.promise import Draws
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.search import Objective
from twofold.planning.workload import WHOLE, WorkloadArguments
from twofold.reporting.output import json_text
from twofold.slo import Slo
from twofold.workload.trace import FORMATS, open_trace, write_trace

# Strictest TTFT bound by trace, in seconds: Mooncake's prompts are ten times as long.
TRACES = {"azure-2023-code.csv": 0.5, "azure-2023-conv.csv": 0.5, "mooncake-conversation.jsonl": 5.0}
MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b")
MACHINES = ("h100", "a100")
SLOS = (1.0, 2.0, 4.0)  # multiples of the strictest bounds
STRICTEST_TPOT_S = 0.03
MOST_MACHINES = 2
BLOCK_S = 180.0  # 20 blocks in an hour


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the planner."""

    trace: str
    model: str
    machine: str
    slo: float

    @property
    def bounds(self) -> Slo:
        return Slo(ttft_s=self.slo * TRACES[self.trace], tpot_s=self.slo * STRICTEST_TPOT_S)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and its best design on the other half of the trace."""

    case: Case
    design: str
    rate: float  # promised, requests/s
    optimistic: float  # rate that the half of the trace allows that the plan has seen
    kept: bool  # on the other half
    kept_optimistic: bool
    possible: float  # highest rate of the design on the other half


def halves(case: Case, number: int, given: argparse.Namespace) -> tuple[Path, Path]:
    """Write the half of a trace that a plan sees and the other half, and return their paths."""
    trace = given.traces / case.trace
    requests = list(open_trace(str(trace)))
    start_s = requests[0].arrival_s
    blocks = math.ceil((requests[-1].arrival_s - start_s) / BLOCK_S)
    order = list(range(blocks))
    if given.split == "blocks":
        random.Random(f"{given.seed} {number}").shuffle(order)
    paths = tuple(given.folder / f"{part}-{given.split}-{number}-{trace.stem}.jsonl" for part in ("seen", "rest"))
    for path, chosen in zip(paths, (order[: blocks // 2], order[blocks // 2 :]), strict=True):
        places = {block: place for place, block in enumerate(sorted(chosen))}
        found = []
        for request in requests:
            block = int((request.arrival_s - start_s) / BLOCK_S)
            if block in places:
                arrival_s = request.arrival_s - start_s + (places[block] - block) * BLOCK_S
                found.append(msgspec.structs.replace(request, arrival_s=arrival_s))
        write_trace(found, path, FORMATS["twofold"])
    return paths


def problem_of(case: Case, trace: Path) -> Problem:
    return Problem(
        template=ClusterSpec(pools=(), model=case.model),
        workload=WorkloadArguments(workload=str(trace)),
        slo=case.bounds,
        split_routers=SPLIT_ROUTERS,
        catalog=load_catalog(),
    )


@contextmanager
def searching(problem: Problem, given: argparse.Namespace) -> Iterator[RateSearch]:
    with EvaluationStore(given.folder / "plan.sqlite") as store, LocalExecutor(problem, given.jobs) as executor:
        evaluator = Evaluator(executor, store, Keys(problem).of)
        yield RateSearch(evaluate=evaluator, bound=AnalyticBounds(problem), grid=RateGrid(given.tolerance))


def planned(case: Case, trace: Path, given: argparse.Namespace) -> DesignChoice:
    problem = problem_of(case, trace)
    families = parse_families(problem, (), case.machine, split=True, colocated=True)
    query = PlanQuery(
        objective=Objective.THROUGHPUT,
        groups=with_parallelism(problem, families)[0],
        budget=Budget(machines=MOST_MACHINES),
        draws=Draws(confidence=given.confidence, numbers=tuple(range(1, given.draws + 1)), whole=True),
    )
    with searching(problem, given) as search:
        return asyncio.run(make_plan(search, query)).best


def checked(case: Case, choice: DesignChoice, rest: Path, given: argparse.Namespace) -> Outcome:
    optimistic = choice.rate * (1.0 if choice.promise is None else choice.promise.margin)
    with searching(problem_of(case, rest), given) as search:
        whole = msgspec.structs.replace(search, draw=WHOLE)

        async def told() -> tuple[bool, bool, float]:
            found = await whole.highest(choice.design, search.grid.step(choice.rate))
            both = [await whole.at_rate(choice.design, rate) for rate in (choice.rate, optimistic)]
            return both[0].met, both[1].met, found.rate

        kept, kept_optimistic, possible = asyncio.run(told())
    return Outcome(
        case=case,
        design=choice.design.name,
        rate=choice.rate,
        optimistic=optimistic,
        kept=kept,
        kept_optimistic=kept_optimistic,
        possible=possible,
    )


def show(outcomes: list[Outcome], without: list[tuple[Case, str]]) -> None:
    console = Console(width=150)
    drawn = Table("trace", "model", "machine", "SLO", "design", "promised", "kept", "whole", "kept", "possible")
    for each in outcomes:
        case = each.case
        drawn.add_row(
            *(case.trace, case.model, case.machine, f"×{case.slo:g}", each.design),
            *(f"{each.rate:.3g}", "yes" if each.kept else "no"),
            *(f"{each.optimistic:.3g}", "yes" if each.kept_optimistic else "no", f"{each.possible:.3g}"),
        )
    console.print(drawn)
    for case, reason in without:
        console.print(
            f"no plan: {case.trace}, {case.model} on {case.machine}, SLO ×{case.slo:g}: {reason}", markup=False
        )
    for name, kept, rates in (
        ("promised rates, from draws of the half", [each.kept for each in outcomes], [each.rate for each in outcomes]),
        (
            "rates for the whole of the half",
            [each.kept_optimistic for each in outcomes],
            [each.optimistic for each in outcomes],
        ),
    ):
        higher = [each.possible / rate - 1 for each, rate in zip(outcomes, rates, strict=True)]
        console.print(
            f"At the {name} that they have seen, {sum(kept)} of {len(outcomes)} plans meet the SLO on the rest of "
            f"their trace; the same designs meet it up to rates higher by {median(higher):.0%} (median; "
            f"{min(higher):.0%} to {max(higher):.0%})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--seed", type=int, default=0, help="of the choice of plans")
    parser.add_argument("--folder", type=Path, help="keep the halves of the traces and all evaluations here")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--split", choices=("time", "blocks"), default="time", help="which half a plan sees")
    given = parser.parse_args()
    given.traces = data_folder() / "traces"
    cases = [
        Case(trace=trace, model=model, machine=machine, slo=slo)
        for trace, model, machine, slo in product(TRACES, MODELS, MACHINES, SLOS)
    ]
    random.Random(given.seed).shuffle(cases)
    outcomes: list[Outcome] = []
    without: list[tuple[Case, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        given.folder = given.folder or Path(temporary)
        given.folder.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(cases):
            if len(outcomes) == given.plans:
                break
            seen, rest = halves(case, number, given)
            try:
                choice = planned(case, seen, given)
            except ConfigurationError as error:
                without.append((case, str(error)))
                continue
            outcomes.append(checked(case, choice, rest, given))
            last = outcomes[-1]
            print(f"{len(outcomes)}: {last.design} at {last.rate:g}, kept: {last.kept}, {last.possible:g}", flush=True)
    show(outcomes, without)
    if given.json is not None:
        given.json.write_text(json_text(outcomes), "utf-8")


if __name__ == "__main__":
    main()
