"""DistServe placements as terminal tables and JSON."""

from collections.abc import Iterator

import msgspec
from rich.console import Group
from rich.text import Text

from twofold.cluster.spec import ClusterSpec
from twofold.instance import Role
from twofold.planning.advice import promise_text
from twofold.planning.deployment import slo_argument
from twofold.planning.evaluator import Effort
from twofold.planning.placement.candidates import PhaseGoodput
from twofold.planning.placement.plan import ParallelismPreference, PlacementPlan, preference
from twofold.planning.plan import DesignChoice
from twofold.planning.promise import Promise
from twofold.reporting.output import JsonReport, same_fields, table
from twofold.reporting.plan.table import effort_text
from twofold.reporting.simulation.statistics import phase_accuracy
from twofold.reporting.summary import rate_text, seconds
from twofold.request import Phase


def placement_tables(plan: PlacementPlan, effort: Effort, title: str) -> Group:
    """Return a placement plan as tables, with a summary in words and the number of simulations."""
    phases = table("Goodput of one instance", PHASE_HEADINGS, range(1, len(PHASE_HEADINGS)), phase_rows(plan))
    headings = (*DESIGN_HEADINGS, ERRORS_HEADING)
    designs = table(title, headings, range(1, len(DESIGN_HEADINGS)), design_rows(plan))
    designs.columns[-1].overflow = "fold"
    return Group(phases, designs, Text(verdict_text(plan), style="bold"), Text(effort_text(effort)))


def verdict_text(plan: PlacementPlan) -> str:
    """Summarize a placement plan in a few sentences."""
    best, query = plan.best, plan.prepared.query
    each = ", ".join(
        f"{count} {role} {kind.short}"
        for role in (Role.PREFILL, Role.DECODE)
        for kind, count in best.design.parts_of(role)
    )
    copies = "" if best.copies == 1 else f" × {best.copies}"
    rate = best.rate * best.copies if query.rate is None else query.rate
    lead = _do_not_split(plan)
    place = "The best split design: place" if lead else "Place"
    first = (
        f"{place} {each}{copies}: {rate_text(rate)} requests/s on {best.accelerators} accelerators, "
        f"{best.per_accelerator:.3g} per accelerator."
    )
    preferred, reason = preference(plan), f"{plan.algorithm}: {plan.prepared.links.reason}."
    sentences = (lead, first, _promised(plan), _against(plan), reason, "" if preferred is None else preferred.text)
    return " ".join(filter(None, sentences))


def _do_not_split(plan: PlacementPlan) -> str:
    if plan.gain >= 1.0:
        return ""
    other = plan.recommended.design.name
    return f"Do not split: {other} has {1 / plan.gain:.2f}× the goodput per accelerator of the best split design."


def _promised(plan: PlacementPlan) -> str:
    placed, query = plan.recommended, plan.prepared.query
    if placed.promise is None:
        return ""
    by_rate = query.rate is None or placed.rate != query.rate
    return promise_text(placed.promise, placed.design.name, placed.rate, by_rate=by_rate)


def _against(plan: PlacementPlan) -> str:
    if not plan.placement.colocated:
        return "No colocated design meets the SLO."
    other, best = plan.placement.colocated[0], plan.best
    if plan.prepared.query.rate is not None and best.copies == 1:
        return f"A colocated design needs {other.accelerators} ({other.design.name})."
    return f"That is {plan.gain:.2f}× the best colocated design ({other.design.name}: {other.per_accelerator:.3g})."


PHASE_HEADINGS = ("instance", "prefill req/s", "per accelerator", "decode req/s", "per accelerator")


def phase_rows(plan: PlacementPlan) -> Iterator[tuple[str, ...]]:
    """Yield a row for each type of instance: its name, and its goodput in each phase."""
    of_prefill = {each.kind: each for each in plan.placement.prefills}
    of_decode = {each.kind: each for each in plan.placement.decodes}
    for kind in sorted({**of_prefill, **of_decode}, key=lambda kind: (kind.name, kind.accelerators, kind.short)):
        yield kind.short, *_goodput(of_prefill.get(kind)), *_goodput(of_decode.get(kind))


def _goodput(found: PhaseGoodput | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (rate_text(found.rate), f"{found.per_accelerator:.3g}")


DESIGN_HEADINGS = ("design", "req/s", "accelerators", "per accelerator", "TTFT P90", "TPOT P90")
ERRORS_HEADING = "model error (prefill / decode)"


def design_rows(plan: PlacementPlan) -> Iterator[tuple[str, ...]]:
    """Yield a row for each simulated design, with the errors of its performance models."""
    for each in (*plan.placement.split, *plan.placement.colocated):
        told = each.evaluation
        yield (
            each.design.name,
            rate_text(each.rate),
            str(each.design.accelerators),
            f"{each.per_accelerator:.3g}",
            seconds(None if told.ttft_s is None else told.ttft_s.p90),
            seconds(None if told.tpot_s is None else told.tpot_s.p90),
            " / ".join(phase_accuracy(told.pools, phase) for phase in Phase),
        )


class PhaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput of one phase on one instance: the highest rate (requests/s) that meets the SLO bound of this phase."""

    phase: str
    machine: str
    tensor_parallel: int | None
    pipeline_parallel: int
    rate: float
    per_accelerator: float
    batcher: str | None  # of the prefill instances; None for the default


class PlacedReport(msgspec.Struct, frozen=True, kw_only=True):
    """JSON output for one placement and its simulated goodput."""

    name: str
    split: bool
    rate: float
    accelerators: int
    per_accelerator: float
    copies: int  # that the plan uses
    promise: Promise | None
    cluster: ClusterSpec


class PlacementReport(JsonReport, frozen=True, kw_only=True):
    """JSON output of `twofold plan --objective goodput --json`."""

    objective: str
    algorithm: str
    reason: str
    model: str
    slo: str
    attainment: float
    rate: float | None
    recommended: PlacedReport  # colocated if splitting does not pay
    best: PlacedReport  # split
    prefill_parallelism: ParallelismPreference | None
    phases: tuple[PhaseReport, ...]
    split: tuple[PlacedReport, ...]
    colocated: tuple[PlacedReport, ...]
    text: str
    effort: dict[str, int | float | None]

    @classmethod
    def of(cls, plan: PlacementPlan, effort: Effort) -> "PlacementReport":
        problem, placement = plan.prepared.problem, plan.placement

        def report(placed: DesignChoice) -> PlacedReport:
            return PlacedReport(
                name=placed.design.name,
                split=placed.design.family.split,
                accelerators=placed.design.accelerators,
                cluster=problem.spec(placed.design),
                **same_fields(PlacedReport, placed, without=("accelerators",)),
            )

        return cls(
            objective="goodput",
            algorithm=plan.algorithm,
            reason=plan.prepared.links.reason,
            model=problem.template.model,
            slo=slo_argument(problem.slo),
            attainment=problem.attainment,
            rate=plan.prepared.query.rate,
            recommended=report(plan.recommended),
            best=report(plan.best),
            prefill_parallelism=preference(plan),
            phases=tuple(_phase_report(each) for each in (*placement.prefills, *placement.decodes)),
            split=tuple(map(report, placement.split)),
            colocated=tuple(map(report, placement.colocated)),
            text=verdict_text(plan),
            effort={**msgspec.to_builtins(effort), "requests_per_cpu_s": effort.requests_per_cpu_s},
        )


def _phase_report(found: PhaseGoodput) -> PhaseReport:
    parallelism = same_fields(PhaseReport, found.kind, without=("machine",))
    goodput = same_fields(PhaseReport, found, without=("phase",))
    return PhaseReport(phase=found.phase.value, machine=found.kind.name, **parallelism, **goodput)
