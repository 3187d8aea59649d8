"""Check the promises of plans on the part of a trace that they have not seen.

Each plan uses the first half of a trace (by time). Its best design is then simulated on the second half, at the mean
rate of the plan. Prints how many plans meet their SLO there, and how much higher a rate the same design could have
promised: the cost of the confidence.

    python bench/planning/promises.py --plans 40 --jobs 2

Needs the traces of the data directory (TWOFOLD_DATA).
"""

import argparse
import asyncio
import os
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

from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Budget
from twofold.planning.evaluator import EvaluationStore, Evaluator, Keys
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.plan import DesignChoice, PlanQuery, make_plan
from twofold.planning.problem import Problem, parse_families, with_parallelism
from twofold.planning.promise import Windows
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.search import Objective
from twofold.planning.workload import WHOLE, WorkloadArguments
from twofold.slo import Slo
from twofold.workload.rescale import window
from twofold.workload.trace import FORMATS, open_trace, write_trace

# Strictest TTFT bound by trace, in seconds: Mooncake's prompts are ten times as long.
TRACES = {"azure-2023-code.csv": 0.5, "azure-2023-conv.csv": 0.5, "mooncake-conversation.jsonl": 5.0}
MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b")
MACHINES = ("h100", "a100")
SLOS = (1.0, 2.0, 4.0)  # multiples of the strictest bounds
STRICTEST_TPOT_S = 0.03
MOST_MACHINES = 2


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
    """A plan, and its best design on the second half of the trace."""

    case: Case
    design: str
    rate: float  # promised, requests/s
    optimistic: float  # rate that a typical window allows
    kept: bool  # on the second half
    kept_optimistic: bool
    possible: float  # highest rate of the design on the second half


def halves(trace: Path, folder: Path) -> tuple[Path, Path]:
    """Write both halves of a trace, by time, and return their paths."""
    requests = list(open_trace(str(trace)))
    middle_s = (requests[0].arrival_s + requests[-1].arrival_s) / 2
    paths = folder / f"first-{trace.stem}.jsonl", folder / f"second-{trace.stem}.jsonl"
    write_trace([each for each in requests if each.arrival_s < middle_s], paths[0], FORMATS["twofold"])
    write_trace(window(requests, middle_s), paths[1], FORMATS["twofold"])
    return paths


def problem_of(case: Case, trace: Path) -> Problem:
    return Problem(
        template=ClusterSpec(pools=(), model=case.model),
        workload=WorkloadArguments(workload=str(trace)),
        slo=case.bounds,
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
        windows=Windows(confidence=given.confidence, draws=tuple(range(1, given.windows + 1)), whole=True),
    )
    with searching(problem, given) as search:
        return asyncio.run(make_plan(search, query)).best


def checked(case: Case, choice: DesignChoice, trace: Path, given: argparse.Namespace) -> Outcome:
    optimistic = choice.rate * (1.0 if choice.promise is None else choice.promise.margin)
    with searching(problem_of(case, trace), given) as search:
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
    drawn = Table("trace", "model", "machine", "SLO", "design", "promised", "kept", "typical", "kept", "possible")
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
    kept, optimistic = (sum(getattr(each, name) for each in outcomes) for name in ("kept", "kept_optimistic"))
    costs = [each.possible / each.rate - 1 for each in outcomes if each.kept]
    console.print(
        f"{kept} of {len(outcomes)} plans meet the SLO on the rest of their trace; at typical rates, {optimistic}"
    )
    if costs:
        console.print(f"The same designs would have met it at a rate higher by {median(costs):.0%} (median)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--seed", type=int, default=0, help="of the choice of plans")
    parser.add_argument("--folder", type=Path, help="keep the halves of the traces and all evaluations here")
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    traces = Path(os.environ.get("TWOFOLD_DATA", "../shared/data")) / "traces"
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
        parts = {name: halves(traces / name, given.folder) for name in TRACES}
        for case in cases:
            if len(outcomes) == given.plans:
                break
            try:
                choice = planned(case, parts[case.trace][0], given)
            except ConfigurationError as error:
                without.append((case, str(error)))
                continue
            outcomes.append(checked(case, choice, parts[case.trace][1], given))
            last = outcomes[-1]
            print(f"{len(outcomes)}: {last.design} at {last.rate:g}, kept: {last.kept}, {last.possible:g}", flush=True)
    show(outcomes, without)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=2))


if __name__ == "__main__":
    main()
