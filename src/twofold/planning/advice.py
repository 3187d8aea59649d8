"""The plain verdict: split or not, how much it brings, and below which rate it brings nothing."""

from collections.abc import Sequence

import msgspec

from twofold.performance.cost import ModelAccuracy
from twofold.planning.plan import DesignChoice, Plan
from twofold.planning.search import Objective


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`gain` is how many times better the best split design is than the best colocated one: in rate, dollars or watts,
    as the objective says; None where one of the two is missing.

    `within_error` says that the performance models and the search are not good enough to tell the two apart.
    """

    split: bool
    gain: float | None
    per_dollar: float | None
    per_watt: float | None
    break_even: float | None
    within_error: bool
    text: str


def advise(plan: Plan, tolerance: float) -> Advice:
    """The verdict on a plan whose rates were found to within `tolerance`."""
    split, colocated = plan.best_split, plan.best_colocated
    if split is None or colocated is None:
        return Advice(
            split=split is not None,
            gain=None,
            per_dollar=None,
            per_watt=None,
            break_even=None,
            within_error=False,
            text=_one_kind(plan),
        )
    gain = _gain(plan.question.objective, split, colocated)
    pays = gain > 1.0
    unsure = abs(gain - 1.0) <= _error((split, colocated)) + tolerance
    first = _comparison(plan.question.objective, split, colocated, gain)
    second = _below(plan, pays=pays)
    third = (
        " The difference is within the errors of the performance models and of the search." if unsure else ""
    )
    return Advice(
        split=pays,
        gain=gain,
        per_dollar=split.requests_per_dollar / colocated.requests_per_dollar,
        per_watt=split.requests_per_kwh / colocated.requests_per_kwh,
        break_even=plan.break_even,
        within_error=unsure,
        text=f"{first}{second}{third}",
    )


def _gain(objective: Objective, split: DesignChoice, colocated: DesignChoice) -> float:
    if objective is Objective.THROUGHPUT:
        return split.highest_rate / colocated.highest_rate
    return objective.weigh(colocated.design)[0] / objective.weigh(split.design)[0]


def _comparison(objective: Objective, split: DesignChoice, colocated: DesignChoice, gain: float) -> str:
    """The first sentence."""
    if objective is Objective.THROUGHPUT:
        dollars = split.requests_per_dollar / colocated.requests_per_dollar
        watts = split.requests_per_kwh / colocated.requests_per_kwh
        theirs, other = f"{_rated(split)}", f"{_rated(colocated)}"
        if gain > 1.0:
            return (
                f"Split: {gain:.2f}× the throughput of the best colocated design, {dollars:.2f}× per dollar and "
                f"{watts:.2f}× per watt ({theirs} against {other})."
            )
        return (
            f"Do not split: the best split design has {gain:.2f}× the throughput of the best colocated one, "
            f"{dollars:.2f}× per dollar and {watts:.2f}× per watt ({theirs} against {other})."
        )
    mine, others = _weight(objective, split), _weight(objective, colocated)
    at = f"at {split.rate:g} requests/s"
    if gain > 1.0:
        return (
            f"Split: {mine} instead of {others} {at}, {1 - 1 / gain:.0%} less "
            f"({split.design.name} against {colocated.design.name})."
        )
    return f"Do not split: {others} colocated, {mine} split {at} ({colocated.design.name} against {split.design.name})."


def _below(plan: Plan, *, pays: bool) -> str:
    """The second sentence: what holds at lower rates."""
    what = "power" if plan.question.objective is Objective.POWER else "money"
    top = plan.question.rate or plan.best.rate
    if plan.break_even is None:
        return (
            f" That holds down to small rates: a split design takes less {what} at each that was looked at."
        )
    if plan.break_even < top:
        return f" Below about {plan.break_even:.2g} requests/s don't: a colocated design takes no more {what} there."
    if pays:
        return (
            f" But at {top:.3g} requests/s a colocated design without that budget would take no more {what}."
        )
    return ""


def _one_kind(plan: Plan) -> str:
    best = plan.best
    kind, other = ("split", "colocated") if best.design.family.split else ("colocated", "split")
    missing = (
        f"no {other} design can keep this SLO"
        if _asked(plan, other == "split")
        else f"{other} designs were left out"
    )
    return f"{best.design.name} is the best {kind} design, at {best.rate:.3g} requests/s; {missing}."


def _asked(plan: Plan, split: bool) -> bool:
    return any(family.split is split for family in plan.question.families)


def _rated(choice: DesignChoice) -> str:
    return f"{choice.design.name} at {choice.highest_rate:.3g} requests/s"


def _weight(objective: Objective, choice: DesignChoice) -> str:
    design = choice.design
    return (
        f"{design.tdp_w / 1e3:,.1f} kW"
        if objective is Objective.POWER
        else f"${design.price_per_h:,.2f} per hour"
    )


def _error(choices: Sequence[DesignChoice]) -> float:
    """The largest error known of the models that the choices rest on.

    Where both rest on the same models, an error moves both the same way and the comparison is better than this.
    """
    errors = {pool.error for choice in choices for pool in choice.evaluation.pools}
    return max((_largest(error) for error in errors), default=0.0)


def _largest(error: ModelAccuracy) -> float:
    return max((each for each in (error.prefill, error.decode) if each is not None), default=0.0)
