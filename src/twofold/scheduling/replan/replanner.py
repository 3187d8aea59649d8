"""What was decided about a shift, with every number that led there, and as a sentence to read.

Re-planning: when the traffic has shifted, is another split of the instances worth a move?

    watching ── a shift ──▶ settling ── the new traffic is known ──▶ searching ── answered ──▶ watching
                   └─ it has passed ──▶ watching

DistServe (OSDI'24, section 4.3) watches rate and lengths and searches again on recent history. Here a shift has to be
significant (`traffic.py`), a plan has to bring a gain (`ReplanRules.min_gain`), and decisions are
`ReplanRules.min_between_s`
apart. Nothing in here searches or moves: whoever drives it asks a `ReplanSearch` and takes the steps of a
`ReplanDecision`.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.replan.split import ReplanAction, ReplanStep, RoleSplit, steps_to
from twofold.scheduling.replan.traffic import Quantity, TrafficMonitor, TrafficSample, TrafficShift


class SplitForecast(msgspec.Struct, frozen=True):
    """The share of requests that a split would serve within the SLO."""

    split: RoleSplit
    attainment: float


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found: `searched` are all forecasts, each from `requests` requests; it took `cpu_s` to compute."""

    running: SplitForecast
    best: SplitForecast
    searched: tuple[SplitForecast, ...]
    requests: int
    cpu_s: float


class ReplanOutcome(StrEnum):
    """What became of a search."""

    MOVE = "move"
    BEST_ALREADY = "best-already"
    TOO_LITTLE = "too-little"
    FAILED = "failed"


class ReplanDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log. `rate` is that of the new traffic; `steps` are in the order in which they are taken.

    `findings` are None, and `reason` says why, where there was no answer.
    """

    at_s: float
    shifts: tuple[TrafficShift, ...]
    rate: float
    outcome: ReplanOutcome
    findings: SearchResult | None
    steps: tuple[ReplanStep, ...]
    reason: str = ""

    def __str__(self) -> str:
        shifted = " and ".join(map(_shift, self.shifts))
        return f"{shifted}; {_searched(self)}; {_decided(self)}"


def _shift(shift: TrafficShift) -> str:
    since = f"since {shift.requests:,} requests ago ({shift.sigmas:.1f} sigmas)"
    if shift.quantity is Quantity.RATE:
        return (
            f"{_times(shift.ratio)} as many requests, {shift.before:.3g} → {shift.after:.3g} a second {since}"
        )
    what = f"{shift.quantity.value}s"
    return f"{what} {_times(shift.ratio)} as long, {shift.before:.3g} → {shift.after:.3g} tokens {since}"


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times"


def _searched(decision: ReplanDecision) -> str:
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


def _decided(decision: ReplanDecision) -> str:
    if decision.outcome is ReplanOutcome.TOO_LITTLE:
        return "stays as it is, because that is too little to move for"
    if decision.outcome is not ReplanOutcome.MOVE:
        return "stays as it is"
    return ", ".join(map(_step, decision.steps)) or "nobody is left to move"


def _step(step: ReplanStep) -> str:
    role = "" if step.role is None else step.role.value
    if step.action is ReplanAction.RETIRE:
        return f"{step.instance} retires"
    return (
        f"{step.instance} goes to {role}"
        if step.action is ReplanAction.ROLE
        else f"{step.instance} starts as {role}"
    )


_LOOK_S = 1.0  # between two looks at a shift that is not settled: they take longer than a request


class ReplanSearch(Protocol):
    """Knows what a split would make of some traffic."""

    def search(self, traffic: TrafficSample, running: RoleSplit, stock: int) -> SearchResult:
        """The best split of at most `stock` instances for the traffic, with forecasts of it and of the running one."""
        ...


class ReplanRules(msgspec.Struct, frozen=True, kw_only=True):
    """When to move.

    A move must bring at least `min_gain` more of the requests within the SLO: forecasts come from some hundred
    requests, and are a point or two off by chance. Decisions are `min_between_s` apart: what runs on a worker whose
    role changes has to end there, so a move that is taken back soon has cost twice and brought nothing. A shift is
    planned for when enough of the new traffic has been seen, or after `patience_s` with what there is: where prompts
    wait for long, no output may end for a while. `start_up_s` is how long an instance takes to start.
    """

    min_gain: float = 0.05
    min_between_s: float = 60.0
    patience_s: float = 20.0
    start_up_s: float = 30.0


class ReplanQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to search a plan for."""

    shifts: tuple[TrafficShift, ...]
    traffic: TrafficSample


class Replanner:
    """The state between two decisions. Times are seconds on the caller's clock."""

    def __init__(self, watch: TrafficMonitor, rules: ReplanRules | None = None) -> None:
        self.watch = watch
        self.rules = rules or ReplanRules()
        self.log: list[ReplanDecision] = []
        self._asked: ReplanQuery | None = None
        self._alarmed_s: float | None = None
        self._quiet_until_s = float("-inf")
        self._look_s = float("-inf")

    def question(self, made: Callable[[int], int], now: float) -> ReplanQuery | None:
        """To be asked after every arrival: what to search a plan for, once there is something; then `answer` it.

        `made` is asked how many tokens a request has so far, by its number.
        """
        if not self.watch.alarmed or self._asked is not None or now < max(self._look_s, self._quiet_until_s):
            return None
        self._look_s = now + _LOOK_S
        shifts = self.watch.shifts()
        if not shifts:
            self._alarmed_s = None
            return None
        if self._alarmed_s is None:
            self._alarmed_s = now
        waited_s = now - self._alarmed_s
        traffic = self.watch.traffic(shifts, made)
        if traffic is None or (waited_s < self.rules.patience_s and not self.watch.settled(shifts)):
            return None
        self.watch.accept(shifts)
        self._alarmed_s = None
        self._asked = ReplanQuery(shifts=tuple(shifts), traffic=traffic)
        return self._asked

    def answer(
        self, findings: SearchResult, pools: Pools, retired: Sequence[str], now: float
    ) -> ReplanDecision:
        """Decide by what the search for the last question found; `retired` are instances that may be started."""
        question = self._asked
        if question is None:
            raise RuntimeError("nobody has asked")
        outcome = self._weigh(findings)
        steps = steps_to(findings.best.split, pools, retired) if outcome is ReplanOutcome.MOVE else ()
        return self._decide(question, outcome, findings, steps, now)

    def give_up(self, reason: str, now: float) -> ReplanDecision:
        """There is no answer to the last question, and why: everything stays as it is."""
        question = self._asked
        if question is None:
            raise RuntimeError("nobody has asked")
        return self._decide(question, ReplanOutcome.FAILED, None, (), now, reason)

    def _weigh(self, findings: SearchResult) -> ReplanOutcome:
        best, running = findings.best, findings.running
        if best.split == running.split:
            return ReplanOutcome.BEST_ALREADY
        # A planner proposes fewer instances only where they are enough.
        saves = best.split.instances < running.split.instances
        gains = best.attainment - running.attainment >= self.rules.min_gain
        return ReplanOutcome.MOVE if saves or gains else ReplanOutcome.TOO_LITTLE

    def _decide(
        self,
        question: ReplanQuery,
        outcome: ReplanOutcome,
        findings: SearchResult | None,
        steps: tuple[ReplanStep, ...],
        now: float,
        reason: str = "",
    ) -> ReplanDecision:
        decision = ReplanDecision(
            at_s=now,
            shifts=question.shifts,
            rate=question.traffic.rate,
            outcome=outcome,
            findings=findings,
            steps=steps,
            reason=reason,
        )
        starts = any(step.action is ReplanAction.START for step in steps)
        self._quiet_until_s = now + self.rules.min_between_s + (self.rules.start_up_s if starts else 0.0)
        self._asked = None
        self.log.append(decision)
        return decision
