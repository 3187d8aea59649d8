"""Re-planning: decide whether to change the split of the instances into prefill and decode.

    monitoring ── traffic shift detected ──▶ settling
    settling ── enough requests since the shift, or long enough wait ──▶ searching
    settling ── traffic shift no longer detected ──▶ monitoring
    searching ── split decided, or search failed ──▶ monitoring

As in DistServe (OSDI'24, section 4.3), the split is planned again on recent traffic. The caller runs the
search for a split and executes the decision.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.replan.traffic import Quantity, TrafficMonitor, TrafficSample, TrafficShift
from twofold.timeline import Timeline


class RoleSplit(msgspec.Struct, frozen=True, order=True):
    """Split of the instances: numbers of prefill and decode instances."""

    prefill: int  # home role
    decode: int

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"

    @classmethod
    def of(cls, loads: Iterable[InstanceLoad]) -> "RoleSplit":
        """Count the prefill and decode instances, without paused instances."""
        homes = [load.home for load in loads if load.place]
        return cls(homes.count(Role.PREFILL), homes.count(Role.DECODE))


class ReplanAction(StrEnum):
    """Kinds of re-planning steps: change the role of an instance, start an instance, or retire an instance."""

    ROLE = "role"
    START = "start"
    RETIRE = "retire"


class ReplanStep(msgspec.Struct, frozen=True):
    """One step of a re-plan: an instance changes its role, starts or retires."""

    action: ReplanAction
    instance: str
    role: Role | None = None  # new home role; None if it retires


def steps_to(split: RoleSplit, pools: Pools, retired: Sequence[str]) -> tuple[ReplanStep, ...]:
    """Return the role changes, starts and retirements that turn the current split of `pools` into `split`."""
    # The instances with the least work change role, because they are available soonest. `retired` can be started.
    leaving_prefill = _leaving(pools, Role.PREFILL, split.prefill, lambda load: load.pending_prefill_tokens)
    leaving_decode = _leaving(pools, Role.DECODE, split.decode, lambda load: load.reserved_tokens)
    running = RoleSplit.of(pools)
    missing = [Role.PREFILL] * (split.prefill - running.prefill) + [Role.DECODE] * (split.decode - running.decode)
    leaving = leaving_prefill + leaving_decode
    moves = [ReplanStep(ReplanAction.ROLE, name, role) for name, role in zip(leaving, missing, strict=False)]
    unmet = missing[len(moves) :]
    starts = [ReplanStep(ReplanAction.START, name, role) for name, role in zip(retired, unmet, strict=False)]
    retires = [ReplanStep(ReplanAction.RETIRE, name) for name in leaving[len(moves) :]]
    return (*moves, *starts, *retires)


def _leaving(pools: Pools, home: Role, wanted: int, work: Callable[[InstanceLoad], int]) -> list[str]:
    """Return the surplus instances of a role, least work first."""
    members = [load for load in pools if load.place and load.home is home]
    members.sort(key=work)  # stable: earlier instances first among equals
    return [load.id for load in members[: max(0, len(members) - wanted)]]


def degraded_plan(planned: RoleSplit, left: int, running: RoleSplit) -> RoleSplit | None:
    """Divide the `left` remaining instances between prefill and decode, while other instances are missing.

    The share of prefill instances is as close as possible to the share in the original plan `planned`. Return
    None if fewer than two instances are left.
    """
    splits = (RoleSplit(prefill, left - prefill) for prefill in range(1, left))

    def rank(split: RoleSplit) -> tuple[int, int]:
        # The distance of the prefill share from the planned share, as an integer so that ties are exact; ties are
        # broken by the distance from the running split.
        distance = abs(split.prefill * planned.instances - planned.prefill * left)
        return distance, abs(split.prefill - running.prefill)

    return min(splits, key=rank, default=None)


_CHECK_EVERY_S = 1.0  # a check of shifts costs more time than the rest of a request


class SplitForecast(msgspec.Struct, frozen=True):
    """Forecast SLO attainment of a split: the share of requests that would meet the SLO."""

    split: RoleSplit
    attainment: float


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search for the best split of instances between prefill and decode."""

    running: SplitForecast
    best: SplitForecast
    searched: tuple[SplitForecast, ...]
    requests: int  # simulated for each split
    cpu_s: float


class ReplanOutcome(StrEnum):
    """Outcomes of a search: change the split, or keep the running split for one of three reasons."""

    MOVE = "move"
    BEST_ALREADY = "best-already"
    TOO_LITTLE = "too-little"
    FAILED = "failed"


class ReplanDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A re-planning decision; `str` formats it as a sentence."""

    at_s: float
    shifts: tuple[TrafficShift, ...]
    rate: float  # of the new traffic, in requests/s
    outcome: ReplanOutcome
    findings: SearchResult | None = None  # None if the search failed
    steps: tuple[ReplanStep, ...] = ()  # in order of execution
    reason: str = ""  # of the failure

    def __str__(self) -> str:
        shifted = " and ".join(map(_shift_text, self.shifts))
        return f"{shifted}; {_search_text(self)}; {_decision_text(self)}"


class ReplanSearch(Protocol):
    """Interface of a search for the best split of instances between prefill and decode."""

    def search(self, traffic: TrafficSample, running: RoleSplit, stock: int) -> SearchResult:
        """Return the forecast SLO attainment of the split `running`, and of the best of at most `stock` instances."""


class ReplanRules(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of re-planning."""

    # A new split must save instances or raise SLO attainment by this much, more than the forecast error of one or two
    # percentage points.
    min_gain: float = 0.05
    min_between_s: float = 60.0  # between decisions: an instance finishes its requests before it changes role
    patience_s: float = 20.0  # to wait until enough requests of the new traffic have arrived and ended
    start_up_s: float = 30.0  # of an instance


class Replanner:
    """Decides when to search for a new split of instances into prefill and decode, and when to adopt one.

    Call `arrived` and `ended` for each request. After arrivals, call `query`. If `query` returns a traffic sample,
    search for a new split.
    """

    def __init__(self, monitor: TrafficMonitor, rules: ReplanRules | None = None) -> None:
        self.monitor = monitor
        self.rules = rules or ReplanRules()
        self.log: list[ReplanDecision] = []
        self._numbers: dict[str, int] = {}  # of requests that have not ended
        self._ids: dict[int, str] = {}
        self._searched: tuple[tuple[TrafficShift, ...], float] | None = None  # shifts and rate of the last query
        self._alarmed_s: float | None = None
        self._quiet_until_s = float("-inf")
        self._check_s = float("-inf")

    def arrived(self, request: Request, now: float) -> int:
        """Record the arrival of a request; return its number in order of arrival."""
        number = self.monitor.arrived(request.prompt_tokens, now)
        self._numbers[request.id], self._ids[number] = number, request.id
        return number

    def ended(self, timeline: Timeline) -> None:
        """Record the output length of a request if its output is complete."""
        number = self._numbers.pop(timeline.request.id, None)
        if number is not None:
            del self._ids[number]
            self.monitor.ended(number, timeline.output_tokens if timeline.complete else None)

    def query(self, generated: Callable[[str], int], now: float) -> TrafficSample | None:
        """Return the recent traffic if a search for a split is due, else None. After it, call `decide` or `give_up`."""
        # `generated(id)` returns the number of output tokens so far of a request.
        if not self.monitor.alarmed or self._searched or now < max(self._check_s, self._quiet_until_s):
            return None
        self._check_s = now + _CHECK_EVERY_S
        shifts = self.monitor.shifts()
        if not shifts:
            self._alarmed_s = None
            return None
        if self._alarmed_s is None:
            self._alarmed_s = now
        waited_s = now - self._alarmed_s
        traffic = self.monitor.traffic(shifts, lambda number: generated(self._ids.get(number, "")))
        if traffic is None or (waited_s < self.rules.patience_s and not self.monitor.settled(shifts)):
            return None
        self.monitor.accept(shifts)
        self._alarmed_s = None
        self._searched = tuple(shifts), traffic.rate
        return traffic

    def decide(self, findings: SearchResult, pools: Pools, retired: Sequence[str], now: float) -> ReplanDecision:
        """Decide whether to change to the best split in `findings`, and log this decision."""
        outcome, (shifts, rate) = self._outcome(findings), self._shifted()
        steps = steps_to(findings.best.split, pools, retired) if outcome is ReplanOutcome.MOVE else ()
        decision = ReplanDecision(at_s=now, shifts=shifts, rate=rate, outcome=outcome, findings=findings, steps=steps)
        return self._log(decision)

    def give_up(self, reason: str, now: float) -> ReplanDecision:
        """Keep the running split because the search failed, and log this decision."""
        shifts, rate = self._shifted()
        failed = ReplanOutcome.FAILED
        return self._log(ReplanDecision(at_s=now, shifts=shifts, rate=rate, outcome=failed, reason=reason))

    def _outcome(self, findings: SearchResult) -> ReplanOutcome:
        best, running = findings.best, findings.running
        if best.split == running.split:
            return ReplanOutcome.BEST_ALREADY
        # A search proposes fewer instances only if they suffice.
        saves = best.split.instances < running.split.instances
        gains = best.attainment - running.attainment >= self.rules.min_gain
        return ReplanOutcome.MOVE if saves or gains else ReplanOutcome.TOO_LITTLE

    def _shifted(self) -> tuple[tuple[TrafficShift, ...], float]:
        if self._searched is None:
            raise RuntimeError("no query is pending")
        return self._searched

    def _log(self, decision: ReplanDecision) -> ReplanDecision:
        starts = any(step.action is ReplanAction.START for step in decision.steps)
        self._quiet_until_s = decision.at_s + self.rules.min_between_s + (self.rules.start_up_s if starts else 0.0)
        self._searched = None
        self.log.append(decision)
        return decision


def _shift_text(shift: TrafficShift) -> str:
    change = f"{shift.ratio:.2g} times, {shift.before:.3g} → {shift.after:.3g}"
    since = f"over the last {shift.requests:,} requests ({shift.sigmas:.1f} sigmas)"
    if shift.quantity is Quantity.RATE:
        return f"rate {change} requests/s {since}"
    return f"{shift.quantity.value} length {change} tokens {since}"


def _search_text(decision: ReplanDecision) -> str:
    findings = decision.findings
    if findings is None:
        return f"search failed: {decision.reason}"
    running, best = findings.running, findings.best
    searched, requests = len(findings.searched), f"{findings.requests:,} requests at {decision.rate:.3g}/s"
    attainment = f"running {running.split} {running.attainment:.0%} within the SLO"
    if best.split == running.split:
        return f"simulated {searched} splits with {requests}: {attainment}, the best"
    return f"simulated {searched} splits with {requests}: {attainment}, {best.split} {best.attainment:.0%}"


def _decision_text(decision: ReplanDecision) -> str:
    if decision.outcome is ReplanOutcome.TOO_LITTLE:
        return "no move: the gain is too small"
    if decision.outcome is not ReplanOutcome.MOVE:
        return "no move"
    return ", ".join(map(_step_text, decision.steps)) or "no instance left to move"


def _step_text(step: ReplanStep) -> str:
    role = "" if step.role is None else step.role.value
    if step.action is ReplanAction.RETIRE:
        return f"{step.instance} retires"
    return f"{step.instance} {'becomes' if step.action is ReplanAction.ROLE else 'starts as'} {role}"
