"""What was decided about a shift, with every number that led there, and as a sentence to read."""

from enum import StrEnum

import msgspec

from twofold.scheduling.split import Action, Split, Step
from twofold.scheduling.traffic import Quantity, Shift


class Forecast(msgspec.Struct, frozen=True):
    """The share of requests that a split would serve within the SLO."""

    split: Split
    attainment: float


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found: `searched` are all forecasts, each from `requests` requests; it took `cpu_s` to compute."""

    running: Forecast
    best: Forecast
    searched: tuple[Forecast, ...]
    requests: int
    cpu_s: float


class Outcome(StrEnum):
    """What became of a search."""

    MOVE = "move"
    BEST_ALREADY = "best-already"
    TOO_LITTLE = "too-little"
    FAILED = "failed"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log. `rate` is that of the new traffic; `steps` are in the order in which they are taken.

    `findings` are None, and `reason` says why, where there was no answer.
    """

    at_s: float
    shifts: tuple[Shift, ...]
    rate: float
    outcome: Outcome
    findings: Findings | None
    steps: tuple[Step, ...]
    reason: str = ""

    def __str__(self) -> str:
        shifted = " and ".join(map(_shift, self.shifts))
        return f"{shifted}; {_searched(self)}; {_decided(self)}"


def _shift(shift: Shift) -> str:
    since = f"since {shift.requests:,} requests ago ({shift.sigmas:.1f} sigmas)"
    if shift.quantity is Quantity.RATE:
        return (
            f"{_times(shift.ratio)} as many requests, {shift.before:.3g} → {shift.after:.3g} a second {since}"
        )
    what = f"{shift.quantity.value}s"
    return f"{what} {_times(shift.ratio)} as long, {shift.before:.3g} → {shift.after:.3g} tokens {since}"


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times"


def _searched(decision: Decision) -> str:
    findings = decision.findings
    if findings is None:
        return f"no plan was found: {decision.reason}"
    running, best = findings.running, findings.best
    searched, requests = len(findings.searched), f"{findings.requests:,} requests at {decision.rate:.3g}/s"
    simulated = f"simulated {searched} splits with {requests}"
    now = f"{running.split}, which runs, would serve {running.attainment:.0%} within the SLO"
    if best.split == running.split:
        return f"{simulated}: {now}, and none more"
    return f"{simulated}: {now}, {best.split} {best.attainment:.0%}"


def _decided(decision: Decision) -> str:
    if decision.outcome is Outcome.TOO_LITTLE:
        return "stays as it is, because that is too little to move for"
    if decision.outcome is not Outcome.MOVE:
        return "stays as it is"
    return ", ".join(map(_step, decision.steps)) or "nobody is left to move"


def _step(step: Step) -> str:
    role = "" if step.role is None else step.role.value
    if step.action is Action.RETIRE:
        return f"{step.instance} retires"
    return (
        f"{step.instance} goes to {role}"
        if step.action is Action.ROLE
        else f"{step.instance} starts as {role}"
    )
