"""Compare simulations with measured deployments: the silicon sample of aiconfigurator-core.

    pip install 'twofold[aiconfigurator]'
    python bench/silicon/compare.py --rows 900
    python bench/silicon/compare.py --mode disagg --inferencex nvidia-master.yaml

Each deployment is simulated as it was run, with the operator times of its engine. Six constants of each engine are
fitted to a third of the rows: a factor of these times, seconds of an iteration, seconds of an iteration for each
sequence, seconds of a request before its first token, the same for each client, and the share of draft tokens that are
accepted. With --by-model, the same rows also give a factor of the operator times of each engine's models. The errors
are those of mean TTFT and mean TPOT in the other rows.

The file nvidia-master.yaml, in `.github/configs` of github.com/SemiAnalysisAI/InferenceX, lists the deployments with
speculative decoding. Without it, none is simulated with speculative decoding. If it has a deployment both with and
without, a measurement counts as speculative if the sample has another of this deployment with a much longer TPOT.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from inferencex import Speculation
from msgspec.structs import replace
from recipes import Recipe, recipe
from rich.console import Console
from rich.table import Table
from rows import SiliconRow, contradicted, silicon_rows
from scipy.optimize import linprog
from simulated import Engine, EngineOverhead, Timings, engines_of, simulated

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.aiconfigurator import EngineLayout
from twofold.reporting.output import json_text

PASSES = 2  # of the fit, each with simulations
LEAST_OPERATORS = 0.5  # factor of the operators' times
ACCEPTANCES = [each / 100 for each in range(40, 100, 2)]  # of a draft token
FEWEST = 3  # rows of a model that has a factor of its own


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A measured deployment and its simulation."""

    row: SiliconRow
    layouts: dict[str, EngineLayout]  # by role
    options: Recipe
    simulated: Timings

    @property
    def draft_tokens(self) -> int:
        return next(iter(self.layouts.values())).draft_tokens

    @property
    def ttft_error(self) -> float:
        return self.simulated.mean_ttft_s / (self.row.silicon_ttft_ms / 1e3) - 1

    @property
    def tpot_error(self) -> float:
        return self.simulated.mean_tpot_s / (self.row.silicon_tpot_ms / 1e3) - 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    rows: int  # complete ones, see `SiliconRow.complete`
    covered: int  # with operator times
    overheads: dict[str, EngineOverhead]  # by engine
    factors: dict[str, dict[str, float]]  # of the operators, by engine and model
    compared: list[Compared]  # rows that nothing was fitted to


class Deployment(NamedTuple):
    """A row with its engine of each role."""

    row: SiliconRow
    engines: dict[Role, Engine]


def least_relative(parts: Sequence[Sequence[float]], wanted: Sequence[float], lowest: float = 0.0) -> list[float]:
    """Fit factors of the parts of each measurement to `wanted`, by the least mean absolute relative error.

    Each element of `parts` has a fixed part first, then the parts to be multiplied, the first of them by at least
    `lowest`.
    """
    measured = np.array(wanted)
    fixed, free = np.split(np.array(parts) / measured[:, None], [1], axis=1)
    count, factors = free.shape
    # Minimise the sum of e with −e ≤ fixed + free·x − 1 ≤ e.
    rest = 1.0 - fixed[:, 0]
    above = np.hstack([free, -np.eye(count)])
    below = np.hstack([-free, -np.eye(count)])
    costs = np.concatenate([np.zeros(factors), np.ones(count)])
    bounds = [(lowest, None)] + [(0.0, None)] * (factors - 1 + count)
    found = linprog(costs, A_ub=np.vstack([above, below]), b_ub=np.concatenate([rest, -rest]), bounds=bounds)
    return [float(factor) for factor in found.x[:factors]]


def fit(known: Sequence[Compared], before: EngineOverhead) -> EngineOverhead:
    """Fit the overhead of an engine to simulations with the overhead `before`."""
    acceptance = min(ACCEPTANCES, key=lambda each: _misses(known, before, replace(before, acceptance=each)))
    found = replace(before, acceptance=acceptance)
    tpots = [each.row.silicon_tpot_ms / 1e3 for each in known]
    # The constants that the iterations contain; the rest of their time is that of the operators.
    parts = []
    for each in known:
        tokens, decodes = found.tokens(each.draft_tokens), each.row.sequences(each.row.roles[-1])
        whole_s = each.simulated.mean_tpot_s * before.tokens(each.draft_tokens)
        operators_s = (whole_s - before.step_s - before.sequence_s * decodes) / before.operators
        parts.append((max(operators_s, 0.0) / tokens, 1.0 / tokens, decodes / tokens))
    # Both fits minimise the mean error; use the one with the lower median error.
    scaled = least_relative([(0.0, *part) for part in parts], tpots, LEAST_OPERATORS)
    added = [1.0, *least_relative(parts, tpots)]
    operators, step_s, sequence_s = min(scaled, added, key=lambda factors: _median_error(parts, factors, tpots))
    clients = [each.row.sequences(each.row.roles[0]) for each in known]
    outside = [before.request_s + before.client_s * count for count in clients]
    ttfts = [
        (each.simulated.mean_ttft_s - before_s, 1.0, count)
        for each, before_s, count in zip(known, outside, clients, strict=True)
    ]
    request_s, client_s = least_relative(ttfts, [each.row.silicon_ttft_ms / 1e3 for each in known])
    return replace(
        found, operators=operators, step_s=step_s, sequence_s=sequence_s, request_s=request_s, client_s=client_s
    )


def _median_error(parts: Sequence[Sequence[float]], factors: Sequence[float], wanted: Sequence[float]) -> float:
    return float(np.median(np.abs(np.array(parts) @ np.array(factors) / np.array(wanted) - 1)))


def _misses(known: Sequence[Compared], before: EngineOverhead, after: EngineOverhead) -> float:
    """Return the median error of TPOT with speculative decoding as in `after`."""
    errors = [
        abs((1 + each.tpot_error) * before.tokens(each.draft_tokens) / after.tokens(each.draft_tokens) - 1)
        for each in known
        if each.draft_tokens
    ]
    return float(np.median(errors)) if errors else 0.0


def model_factors(known: Iterable[Compared]) -> dict[str, dict[str, float]]:
    """Return the median ratio of measured and simulated TPOT, by engine and architecture."""
    ratios = defaultdict[str, defaultdict[str, list[float]]](lambda: defaultdict(list))
    for each in known:
        ratios[each.row.backend][each.row.architecture].append(1 / (1 + each.tpot_error))
    return {
        engine: {name: float(np.median(found)) for name, found in by_model.items() if len(found) >= FEWEST}
        for engine, by_model in ratios.items()
    }


def compare(
    deployments: Iterable[Deployment], overhead: Callable[[SiliconRow], EngineOverhead], most: int
) -> list[Compared]:
    return [
        Compared(
            row=row,
            layouts={role.value: engine.layout for role, engine in engines.items()},
            options=recipe(row),
            simulated=simulated(row, engines, overhead(row), most),
        )
        for row, engines in deployments
    ]


def covered(rows: Iterable[SiliconRow], draft_tokens: Callable[[SiliconRow], int]) -> list[Deployment]:
    found = ((row, engines_of(row, draft_tokens(row))) for row in rows)
    return [Deployment(row, engines) for row, engines in found if engines is not None]


def run(given: argparse.Namespace) -> Report:
    rows = [row for row in silicon_rows() if row.mode == given.mode and row.complete]
    faster = contradicted(rows)
    speculation = given.inferencex and Speculation(given.inferencex)
    random.Random(given.seed).shuffle(rows)
    rows = rows[: given.rows]

    def draft_tokens(row: SiliconRow) -> int:
        return speculation.depth(row, faster=row.id in faster) if speculation else 0

    known = covered(rows, draft_tokens)
    fitted, rest = ([each for each in known if each.row.fitted is third] for third in (True, False))
    overheads = {each.row.backend: EngineOverhead() for each in known}
    factors: dict[str, dict[str, float]] = {}

    def overhead_of(row: SiliconRow) -> EngineOverhead:
        engine = overheads[row.backend]
        factor = factors.get(row.backend, {}).get(row.architecture, 1.0)
        return replace(engine, operators=engine.operators * factor)

    for _ in range(PASSES):
        found = compare(fitted, overhead_of, given.requests)
        overheads = {
            engine: fit([each for each in found if each.row.backend == engine], overhead)
            for engine, overhead in sorted(overheads.items())
        }
    if given.by_model:
        factors = model_factors(compare(fitted, overhead_of, given.requests))
    compared = compare(rest, overhead_of, given.requests)
    return Report(rows=len(rows), covered=len(known), overheads=overheads, factors=factors, compared=compared)


def show(report: Report) -> None:
    console = Console(width=120)
    share = report.covered / report.rows
    console.print(f"{report.rows} rows, of which {report.covered} ({share:.0%}) have operator times")
    drafted = sum(each.draft_tokens > 0 for each in report.compared)
    console.print(f"of {len(report.compared)} rows that nothing was fitted to, {drafted} decode speculatively")
    for engine, overhead in report.overheads.items():
        console.print(
            f"{engine}: operators ×{overhead.operators:.2f}, {overhead.step_s * 1e3:.2f} ms an iteration, "
            f"{overhead.sequence_s * 1e6:.0f} µs for each sequence; {overhead.request_s * 1e3:.0f} ms a request, "
            f"{overhead.client_s * 1e3:.1f} ms for each client; {overhead.acceptance:.0%} of draft tokens accepted"
        )
    for engine, by_model in sorted(report.factors.items()):
        console.print(f"{engine}: {', '.join(f'{name} ×{factor:.2f}' for name, factor in sorted(by_model.items()))}")
    drafts = {each.row.id: each.draft_tokens for each in report.compared}
    groups: tuple[tuple[str, Callable[[SiliconRow], str]], ...] = (
        ("", lambda _: "all"),
        ("engine", lambda row: row.backend),
        ("system", lambda row: row.system),
        ("speculation", lambda row: f"draft tokens {drafts[row.id]}"),
        ("model", lambda row: f"{row.model_path.rpartition('/')[2]} {row.backend}"),
    )
    drawn = Table("", "rows", *(f"{name} {what}" for name in ("TPOT", "TTFT") for what in ("median", "mean", "P90")))
    for _, key in groups:
        by_key: dict[str, list[Compared]] = {}
        for each in report.compared:
            by_key.setdefault(key(each.row), []).append(each)
        for name, members in sorted(by_key.items(), key=lambda item: -len(item[1])):
            errors = [[abs(each.tpot_error) for each in members], [abs(each.ttft_error) for each in members]]
            cells = [
                f"{value:.0%}" for each in errors for value in (np.median(each), np.mean(each), np.quantile(each, 0.9))
            ]
            drawn.add_row(name, str(len(members)), *cells)
        drawn.add_section()
    console.print(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("agg", "disagg"), default="agg", help="colocated or disaggregated")
    parser.add_argument("--rows", type=int, help="rows of the sample (default: all)")
    parser.add_argument("--requests", type=int, default=600, help="simulate all rounds up to this number of requests")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of rows")
    parser.add_argument("--inferencex", type=Path, help="configurations of InferenceX: nvidia-master.yaml")
    parser.add_argument("--by-model", action="store_true", help="fit a factor of each engine's models too")
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    try:
        report = run(given)
    except ConfigurationError as error:
        raise SystemExit(f"{error}") from error
    show(report)
    if given.json is not None:
        given.json.write_text(json_text(report), "utf-8")


if __name__ == "__main__":
    main()
