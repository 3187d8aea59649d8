"""Compare simulations with measured deployments: the silicon sample of aiconfigurator-core.

    pip install 'twofold[aiconfigurator]'
    python bench/silicon/compare.py --rows 900
    git clone https://github.com/SemiAnalysisAI/InferenceX
    python bench/silicon/compare.py --mode disagg --inferencex InferenceX

Each deployment is simulated as it was run, with the operator times of its engine. Six constants of each engine are
fitted to a third of the rows: a factor of these times, seconds of an iteration, seconds of an iteration for each
sequence, seconds of a request before its first token, the same for each client, and the share of draft tokens that are
accepted. Disaggregated deployments give three more: other factors for decodes on ranks that share experts and for
prefill instances, and decode iterations for which a decode worker lets a request wait. With --by-model, the same rows
also give a factor of the operator times of each engine's models. The errors are those of mean TTFT and mean TPOT in the
other rows.

A clone of github.com/SemiAnalysisAI/InferenceX tells the sequences that a decode worker takes, and which deployments
decode speculatively. Without it, no batch is limited, and no deployment decodes speculatively. If it has a deployment
both with and without speculation, a measurement counts as speculative if the sample has another of this deployment
with a much longer TPOT.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from inferencex import Deployments, Setting
from msgspec.structs import replace
from recipes import Recipe, recipe
from rich.console import Console
from rich.table import Table
from rows import SiliconRow, contradicted, distinct, silicon_rows
from scipy.optimize import linprog
from simulated import Engine, EngineOverhead, Timings, engines_of, shares_experts, simulated

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.aiconfigurator import EngineLayout
from twofold.reporting.output import json_text

PASSES = 2  # of the fit, each with simulations
LEAST_OPERATORS = 0.5  # factor of the operators' times
PROMPTS = [each / 10 for each in range(6, 16)]  # factors of those of prefill instances
ACCEPTANCES = [each / 100 for each in range(40, 100, 2)]  # of a draft token
FEWEST = 3  # rows of a model that has a factor of its own


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A measured deployment and its simulation."""

    row: SiliconRow
    layouts: dict[str, EngineLayout]  # by role
    options: Recipe
    batch: int | None  # most sequences of a rank that decodes
    simulated: Timings

    @property
    def draft_tokens(self) -> int:
        return next(iter(self.layouts.values())).draft_tokens

    @property
    def decodes_apart(self) -> bool:
        """Whether a disaggregated deployment decodes on ranks that share experts."""
        return self.row.mode == "disagg" and shares_experts(self.layouts[Role.DECODE.value])

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
    batch: int | None


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
        apart = each.decodes_apart
        factor = before.ranks if apart and before.ranks is not None else before.operators
        operators_s = max(0.0, (whole_s - before.step_s - before.sequence_s * decodes) / factor)
        split = (0.0, operators_s) if apart else (operators_s, 0.0)
        parts.append((*(part / tokens for part in split), 1.0 / tokens, decodes / tokens))
    # Both fits minimise the mean error; use the one with the lower median error.
    scaled = least_relative([(0.0, *part) for part in parts], tpots, LEAST_OPERATORS)
    added = [1.0, 1.0, *least_relative([(part[0] + part[1], *part[2:]) for part in parts], tpots)]
    operators, ranks, step_s, sequence_s = min(scaled, added, key=lambda factors: _median_error(parts, factors, tpots))
    outside, _ = fit_outside(known, before)
    return replace(
        found,
        operators=operators,
        ranks=ranks if known[0].row.mode == "disagg" else None,
        step_s=step_s,
        sequence_s=sequence_s,
        request_s=outside.request_s,
        client_s=outside.client_s,
        iterations=outside.iterations,
    )


def fit_outside(known: Sequence[Compared], before: EngineOverhead) -> tuple[EngineOverhead, float]:
    """Fit the times of a request outside iterations. Return the overhead with them, and the median error of TTFT."""
    parts = []
    for each in known:
        clients = each.row.sequences(each.row.roles[0])
        iteration_s = each.simulated.mean_tpot_s
        outside_s = before.request_s + before.client_s * clients + before.iterations * iteration_s
        waits = () if each.row.mode == "agg" else (iteration_s,)
        parts.append((each.simulated.mean_ttft_s - outside_s, 1.0, clients, *waits))
    wanted = [each.row.silicon_ttft_ms / 1e3 for each in known]
    factors = least_relative(parts, wanted)
    request_s, client_s, iterations = (*factors, 0.0)[:3]
    found = replace(before, request_s=request_s, client_s=client_s, iterations=iterations)
    return found, _median_error(parts, [1.0, *factors], wanted)


def fit_prompts(
    fitted: Sequence[Deployment], overheads: dict[str, EngineOverhead], most: int
) -> dict[str, EngineOverhead]:
    """Fit a factor of the operators of prefill instances, where prompts are alone."""
    tries = defaultdict[str, list[tuple[float, EngineOverhead]]](list)
    for factor in PROMPTS:
        tried = {engine: replace(each, prompts=factor) for engine, each in overheads.items()}
        found = compare(fitted, lambda row: tried[row.backend], most)  # noqa: B023  (called before the next factor)
        for engine, overhead in tried.items():
            outside, error = fit_outside([each for each in found if each.row.backend == engine], overhead)
            tries[engine].append((error, outside))
    return {engine: min(each, key=itemgetter(0))[1] for engine, each in tries.items()}


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
            batch=batch,
            simulated=simulated(row, engines, overhead(row), most, batch),
        )
        for row, engines, batch in deployments
    ]


def covered(rows: Iterable[SiliconRow], setting_of: Callable[[SiliconRow], Setting]) -> Iterator[Deployment]:
    """Yield the deployments that the package has operator times of."""
    for row in rows:
        setting = setting_of(row)
        if row.mode == "disagg":
            for role, part in zip(row.roles, setting.parts, strict=False):
                row = row.with_attention(role, data=part.attention_data)  # noqa: PLW2901
        engines = engines_of(row, setting.draft_tokens)
        if engines is not None:
            yield Deployment(row, engines, setting.batch)


def completed(rows: Sequence[SiliconRow], deployments: Deployments) -> list[SiliconRow]:
    """Return one row of each measurement, with the listed numbers of workers if the sample lacks them."""
    known = {row.measurement: row for row in rows if row.complete}
    found = [deployments.completed(row) for row in rows]
    again = [
        (row, known[row.measurement])
        for row, given in zip(found, rows, strict=True)
        if not given.complete and row.complete and row.measurement in known
    ]
    alike = sum(all(row.ranks(role) == other.ranks(role) for role in row.roles) for row, other in again)
    print(f"{alike} of {len(again)} rows that are in the sample again with their ranks have the same in the list")
    return distinct(sorted(found, key=lambda row: row is not known.get(row.measurement)))


def run(given: argparse.Namespace) -> Report:
    deployments = given.inferencex and Deployments(given.inferencex)
    rows = [row for row in silicon_rows() if row.mode == given.mode and row.concurrency]
    if deployments and given.listed:
        rows = completed(rows, deployments)
    rows = [row for row in rows if row.complete]
    faster = contradicted(rows)
    random.Random(given.seed).shuffle(rows)
    rows = rows[: given.rows]

    def setting_of(row: SiliconRow) -> Setting:
        return deployments.setting(row, faster=row.id in faster) if deployments else Setting()

    known = list(covered(rows, setting_of))
    fitted, rest = ([each for each in known if each.row.fitted is third] for third in (True, False))
    overheads = {each.row.backend: EngineOverhead() for each in known}
    factors: dict[str, dict[str, float]] = {}

    def overhead_of(row: SiliconRow) -> EngineOverhead:
        engine = overheads[row.backend]
        factor = factors.get(row.backend, {}).get(row.architecture, 1.0)
        parts = {name: getattr(engine, name) for name in ("operators", "ranks", "prompts")}
        return replace(engine, **{name: each and each * factor for name, each in parts.items()})

    for _ in range(PASSES):
        if given.mode == "disagg":
            overheads = fit_prompts(fitted, overheads, given.requests)
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
        parts = {"on ranks that share experts": overhead.ranks, "of prompts": overhead.prompts}
        others = "".join(f", {name} ×{factor:.2f}" for name, factor in parts.items() if factor is not None)
        waits = f", {overhead.iterations:.0f} decode iterations" if overhead.iterations else ""
        console.print(
            f"{engine}: operators ×{overhead.operators:.2f}{others}; {overhead.step_s * 1e3:.2f} ms an "
            f"iteration, {overhead.sequence_s * 1e6:.0f} µs for each sequence; {overhead.request_s * 1e3:.0f} ms a "
            f"request, {overhead.client_s * 1e3:.1f} ms for each client{waits}; {overhead.acceptance:.0%} of draft "
            "tokens accepted"
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
    parser.add_argument("--inferencex", type=Path, help="clone of InferenceX's repository")
    parser.add_argument(
        "--listed", action="store_true", help="also simulate rows that lack numbers of workers, if the clone lists them"
    )
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
