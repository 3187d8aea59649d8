"""Count the requests that each overload rule rejects when a trace is replayed at twice its rate.

Mooncake (arXiv 2407.00079, section 7) reports 4,183 rejections for the baseline, 3,771 for early rejection and
3,589 for early rejection with prediction, on a trace of 23,000 requests that is not public. This script simulates
Mooncake's public conversation trace on LLaMA2-70B, with 8 prefill machines and 8 decode machines of 8 A100 each.
A prefill is wasted if the request is rejected after the prefill. Exits with 1 unless:
- the baseline rejects more requests than early rejection, and early rejection more than early rejection with
  prediction
- the prefill load and the decode load have smaller standard deviations with prediction than without prediction
- the baseline wastes more prefills than early rejection, and prediction does not increase wasted prefills
- at least 90% of served requests meet the TTFT bound, and at least 90% meet the TPOT bound
"""

import argparse
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from twofold.bench.real_data import data_folder
from twofold.cluster.spec import CacheSpec, ClusterSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.scheduling.admission.overload import OVERLOAD_RULES
from twofold.simulation.overload import DECODE, PREFILL
from twofold.simulation.result import SimulationResult
from twofold.simulation.series import Series
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.workload.rescale import scale_rate, take
from twofold.workload.trace import open_trace

TRACE = data_folder() / "traces" / "mooncake-conversation.jsonl"
MACHINE = "dgx-a100"
LINK_BYTES_PER_S = 100e9  # the paper's 800 Gb/s
SLO = "ttft=30,tpot=0.1"


def cluster(given: argparse.Namespace) -> ClusterSpec:
    return ClusterSpec(
        pools=(
            PoolSpec(machines=given.prefill, machine=MACHINE, role=Role.PREFILL),
            PoolSpec(machines=given.decode, machine=MACHINE, role=Role.DECODE),
        ),
        model=given.model,
        performance=given.performance,
        router=given.router,
        kv_cache=CacheSpec(dram=given.room) if given.room else None,
        link_bytes_per_s=LINK_BYTES_PER_S,
    )


def refused_late(result: SimulationResult) -> int:
    """Return the number of requests rejected after their prefill."""
    assert result.overload is not None  # noqa: S101  (for the type checker)
    return sum(count for why, count in result.overload.refusals.items() if why.endswith("-after-prefill"))


def loads_of(result: SimulationResult) -> tuple[Series, Series]:
    return result.series[PREFILL], result.series[DECODE]


def fluctuation(series: Series) -> float:
    """Return the standard deviation of a load over time."""
    return statistics.pstdev([mean for _, mean, _ in series.points()])


def row(name: str, result: SimulationResult) -> list[str]:
    overload = result.overload
    assert overload is not None  # noqa: S101  (as above)
    share = overload.wasted_prefill_tokens / (overload.wasted_prefill_tokens + result.prompt_tokens)
    swings = [f"{series.mean():.2f} ± {fluctuation(series):.2f}" for series in loads_of(result)]
    together = overload.load_correlation
    return [
        name,
        f"{result.rejected:,}",
        f"{overload.refusals.get('prefill-load', 0) + overload.refusals.get('beyond-slo', 0):,}",
        f"{overload.refusals.get('decode-load', 0):,}",
        f"{refused_late(result):,}",
        f"{share:.1%}",
        f"{result.ttft_s.percentile(90) or 0.0:.1f}",
        f"{(result.tpot_s.percentile(90) or 0.0) * 1e3:.0f}",
        f"{(result.slo_met or 0) / result.completed:.1%}",
        *swings,
        "–" if together is None else f"{together:+.2f}",
    ]


def failures(results: dict[str, SimulationResult], slo: Slo) -> Iterator[str]:
    """Return one sentence per expectation that does not hold."""
    order = ("baseline", "early", "predicted")
    for more, fewer in pairwise(order):
        one, other = results[more].rejected, results[fewer].rejected
        if one <= other:
            yield f"{more} refuses {one:,}, not more than {fewer} with {other:,}"
    for place, phase in enumerate(("prefill", "decode")):
        without, with_it = (fluctuation(loads_of(results[name])[place]) for name in ("early", "predicted"))
        if with_it >= without:
            yield f"the {phase} load fluctuates by {with_it:.3f} with prediction, not less than {without:.3f} without"
    if not refused_late(results["predicted"]) <= refused_late(results["early"]) < refused_late(results["baseline"]):
        yield "wasted prefills are not below the baseline's, or higher with prediction than without"
    for name in order:
        for what, latencies, bound in (
            ("TTFT", results[name].ttft_s, slo.ttft_s),
            ("TPOT", results[name].tpot_s, slo.tpot_s),
        ):
            value = latencies.percentile(90) or 0.0
            if bound is not None and value > bound:
                yield f"{name}: P90 {what} is {value:.3g} s, above {bound:g} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--speed", type=float, default=2.0, help="replay speed relative to the recording")
    parser.add_argument("--slo", default=SLO)
    parser.add_argument("--model", default="llama2-70b")
    parser.add_argument("--performance", default="fitted")
    parser.add_argument("--router", default="conductor")
    parser.add_argument("--room", default="3000000 tokens", help="prefix cache of each machine; empty: none")
    parser.add_argument("--requests", type=int, help="number of requests")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--only", choices=tuple(OVERLOAD_RULES), help="run one rule without a verdict")
    args = parser.parse_args()
    slo = Slo.parse(args.slo)
    console = Console(width=160)
    table = Table(
        title=f"{args.trace.name} at {args.speed:g}×, {args.prefill}P+{args.decode}D of {MACHINE}, {args.slo}",
        title_justify="left",
    )
    for heading in (
        *("rule", "refused", "prefill", "decode", "after prefill", "in vain"),
        *("TTFT P90 s", "TPOT P90 ms", "in SLO", "load P", "load D", "correlation"),
    ):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    results: dict[str, SimulationResult] = {}
    for name in OVERLOAD_RULES if args.only is None else (args.only,):
        arriving = take(scale_rate(open_trace(args.trace), args.speed), args.requests)
        results[name] = simulate(cluster(args), arriving, catalog=load_catalog(), slo=slo, series=False, overload=name)
        table.add_row(*row(name, results[name]))
    console.print(table)
    wrong = [] if args.only is not None else list(failures(results, slo))
    for sentence in wrong:
        console.print(f"[red]FAILED:[/] {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
