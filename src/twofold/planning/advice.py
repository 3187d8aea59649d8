"""Comparison of a plan's best split design with its best colocated design."""

from collections.abc import Sequence

import msgspec

from twofold.planning.plan import DesignChoice, Plan
from twofold.planning.promise import Promise
from twofold.planning.search import Objective


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on whether the best split design of a plan is better than the best colocated design, and by how much."""

    split: bool
    gain: float | None = None  # in rate, price or watts: above 1 if the split design is better
    per_dollar: float | None = None
    per_watt: float | None = None
    break_even: float | None = None  # requests/s below which a colocated design is at least as good
    within_error: bool = False  # of the performance models and the search
    text: str


def advise(plan: Plan, tolerance: float) -> Advice:
    """Compare a plan's best split and best colocated design. `tolerance` is the relative error of the plan's rates."""
    split, colocated = plan.best_split, plan.best_colocated
    if split is None or colocated is None:
        return Advice(split=split is not None, text=f"{_one_kind(plan)}{_promised(plan)}")
    gain = _gain(plan.query.objective, split, colocated)
    pays = gain > 1.0
    unsure = abs(gain - 1.0) <= _error((split, colocated)) + tolerance
    first = _comparison(plan.query.objective, split, colocated, gain)
    second = _below(plan, pays=pays)
    third = " The difference is within the error of the performance models and the search." if unsure else ""
    return Advice(
        split=pays,
        gain=gain,
        per_dollar=_ratio(split.requests_per_dollar, colocated.requests_per_dollar),
        per_watt=_ratio(split.requests_per_kwh, colocated.requests_per_kwh),
        break_even=plan.break_even,
        within_error=unsure,
        text=f"{first}{second}{third}{_promised(plan)}",
    )


def _gain(objective: Objective, split: DesignChoice, colocated: DesignChoice) -> float:
    if objective is Objective.THROUGHPUT:
        return split.highest_rate / colocated.highest_rate
    return objective.weigh(colocated.design)[0] / objective.weigh(split.design)[0]


def _ratio(split: float | None, colocated: float | None) -> float | None:
    return None if split is None or colocated is None else split / colocated


def _comparison(objective: Objective, split: DesignChoice, colocated: DesignChoice, gain: float) -> str:
    if objective is Objective.THROUGHPUT:
        if gain > 1.0:
            return f"Split: {_compared(split, colocated, 'colocated')}"
        return f"Do not split: {_compared(colocated, split, 'split')}"
    mine, others = _weight(objective, split), _weight(objective, colocated)
    at = f"at {split.rate:g} requests/s"
    if gain > 1.0:
        return (
            f"Split: {mine} instead of {others} {at}, {1 - 1 / gain:.0%} less "
            f"({split.design.name} against {colocated.design.name})."
        )
    return f"Do not split: {others} colocated, {mine} split {at} ({colocated.design.name} against {split.design.name})."


def _compared(better: DesignChoice, other: DesignChoice, kind: str) -> str:
    dollars = _ratio(better.requests_per_dollar, other.requests_per_dollar)
    watts = _ratio(better.requests_per_kwh, other.requests_per_kwh)
    known = [(dollars, "per dollar"), (watts, "per watt")]
    per = " and ".join(f"{ratio:.2f}× {unit}" for ratio, unit in known if ratio is not None)
    return (
        f"{better.highest_rate / other.highest_rate:.2f}× the throughput of the best {kind} design"
        f"{', ' if per else ''}{per} ({_rated(better)} against {_rated(other)})."
    )


def _below(plan: Plan, *, pays: bool) -> str:
    power = plan.query.objective is Objective.POWER
    what, costs = ("power", "needs no more power") if power else ("money", "costs no more")
    top = plan.query.rate or plan.best.rate
    if plan.break_even is None:
        return f" This holds at all lower rates searched: a split design needs less {what}."
    if plan.break_even < top:
        return f" Below about {plan.break_even:.2g} requests/s, a colocated design {costs}."
    if pays:
        return f" Without the {plan.query.budget.description}, a colocated design {costs} at {top:.3g} requests/s."
    return ""


def _promised(plan: Plan) -> str:
    best, by_rate = plan.best, plan.query.objective is Objective.THROUGHPUT
    if best.promise is None:
        return ""
    return " " + promise_text(best.promise, best.design.name, best.rate, by_rate=by_rate)


def promise_text(promise: Promise, name: str, rate: float, *, by_rate: bool) -> str:
    """Say in how many unseen draws of the workload a design meets the SLO, and what this costs.

    `by_rate` is whether its rate was changed to meet the SLO in them, rather than its size.
    """
    low, high = promise.interval
    whole = {None: "", True: ", as does the whole trace", False: ", but the whole trace misses it"}[promise.whole]
    first = (
        f"In {promise.kept} of {promise.draws} draws that the search did not use, {name} meets the SLO at {rate:.3g} "
        f"requests/s (95% interval {low:.0%} to {high:.0%}){whole}."
    )
    if not promise.holds:
        return f"{first} A confidence of {promise.confidence:.0%} needs more, and no design in the budget has more."
    if promise.margin <= 1.0:
        return first
    alone = "the draw of the search" if promise.whole is None else "the whole trace"
    if by_rate:
        return f"{first} For {alone} alone, it meets the SLO at {promise.margin:.2f}× this rate."
    return f"{first} It costs {promise.margin:.2f}× as much as {promise.optimistic}, enough for {alone} alone."


def _one_kind(plan: Plan) -> str:
    best = plan.best
    kind, other = ("split", "colocated") if best.design.family.split else ("colocated", "split")
    asked = [group[0].group for group in plan.query.groups if group[0].split is (other == "split")]
    if not asked:
        missing = f"{other} designs were excluded"
    elif set(asked) <= set(plan.no_room):
        missing = f"the budget has no room for a {other} design"
        if other == "split":
            missing += ": each phase needs a machine of its own (--objective goodput divides a machine)"
    else:
        missing = f"no {other} design meets the SLO"
    return f"{best.design.name} is the best {kind} design, at {best.rate:.3g} requests/s; {missing}."


def _rated(choice: DesignChoice) -> str:
    return f"{choice.design.name} at {choice.highest_rate:.3g} requests/s"


def _weight(objective: Objective, choice: DesignChoice) -> str:
    design = choice.design
    return f"{design.tdp_w / 1e3:,.1f} kW" if objective is Objective.POWER else f"${design.price_per_h:,.2f} per hour"


def _error(choices: Sequence[DesignChoice]) -> float:
    errors = {pool.error for choice in choices for pool in choice.evaluation.pools}
    return max((each for error in errors for each in (error.prefill, error.decode) if each is not None), default=0.0)
