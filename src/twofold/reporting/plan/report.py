"""JSON report of a plan."""

import msgspec

from twofold.cluster.spec import ClusterSpec
from twofold.planning.advice import Advice
from twofold.planning.deployment import SloMargin, margins, slo_argument
from twofold.planning.design import Design, RatedDesign
from twofold.planning.evaluation import Evaluation
from twofold.planning.evaluator import Effort
from twofold.planning.plan import DesignChoice, Plan
from twofold.planning.problem import Problem
from twofold.planning.promise import Promise
from twofold.reporting.output import JsonReport, same_fields


class DesignReport(msgspec.Struct, frozen=True, kw_only=True):
    """A design with its price and power."""

    name: str
    family: str
    split: bool
    machines: tuple[tuple[str, int], ...]  # numbers of machines by type, prefill first
    price_per_h: float
    tdp_w: float

    @classmethod
    def of(cls, design: Design) -> "DesignReport":
        return cls(
            family=design.family.group,
            split=design.family.split,
            machines=tuple((kind.name, count) for kind, count in design.machines_by_kind()),
            **same_fields(cls, design, without=("family", "machines")),
        )


class ChoiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The best design in a family (designs that differ only in numbers of machines), evaluated at `rate` requests/s."""

    design: DesignReport
    rate: float
    highest_rate: float
    requests_per_dollar: float | None
    requests_per_kwh: float | None
    mean_power_w: float
    margins: tuple[SloMargin, ...]
    cluster: ClusterSpec
    evaluation: Evaluation
    promise: Promise | None

    @classmethod
    def of(cls, problem: Problem, choice: DesignChoice) -> "ChoiceReport":
        return cls(
            design=DesignReport.of(choice.design),
            mean_power_w=choice.evaluation.mean_power_w,
            margins=tuple(margins(choice.evaluation.checks)),
            cluster=problem.spec(choice.design),
            **same_fields(cls, choice, without=("design",)),
        )


class ParetoPointReport(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the Pareto front: a design and a rate at which it meets the SLO."""

    design: DesignReport
    rate: float


class PlanReport(JsonReport, frozen=True, kw_only=True):
    """JSON output of `twofold plan --json`."""

    objective: str
    rate: float | None
    model: str
    workload: dict[str, str | int | float | None]
    slo: str
    attainment: float
    advice: Advice
    choices: tuple[ChoiceReport, ...]  # best design of each family, best first
    without: tuple[str, ...]  # names of the families without a design that meets the SLO
    no_room: tuple[str, ...]  # names of the families without a design in the budget
    pareto: tuple[ParetoPointReport, ...]
    effort: dict[str, int | float | None]  # all other fields are reproducible

    @classmethod
    def of(
        cls, problem: Problem, plan: Plan, advice: Advice, front: tuple[RatedDesign, ...], effort: Effort
    ) -> "PlanReport":
        return cls(
            objective=plan.query.objective.value,
            rate=plan.query.rate,
            model=problem.template.model,
            workload=msgspec.to_builtins(problem.workload),
            slo=slo_argument(problem.slo),
            attainment=problem.attainment,
            advice=advice,
            choices=tuple(ChoiceReport.of(problem, choice) for choice in plan.choices),
            without=plan.without,
            no_room=plan.no_room,
            pareto=tuple(ParetoPointReport(design=DesignReport.of(each.design), rate=each.rate) for each in front),
            effort={**msgspec.to_builtins(effort), "requests_per_cpu_s": effort.requests_per_cpu_s},
        )
