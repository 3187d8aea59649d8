"""Re-planning: when the traffic has shifted, is another split of the instances worth a move?

    watching ── a shift ──▶ settling ── the new traffic is known ──▶ searching ── answered ──▶ watching
                   └─ it has passed ──▶ watching

DistServe (OSDI'24, section 4.3) watches rate and lengths and searches again on recent history. Here a shift has to be
significant (`traffic.py`), a plan has to bring a gain (`Rules.min_gain`), and decisions are `Rules.min_between_s`
apart. Nothing in here searches or moves: whoever drives it asks a `Planner` and takes the steps of a `Decision`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from twofold.scheduling.pools import Pools
from twofold.scheduling.replan_log import Decision, Findings, Forecast, Outcome
from twofold.scheduling.split import Action, Split, Step, steps_to
from twofold.scheduling.traffic import Shift, Traffic, TrafficWatch

__all__ = ["Decision", "Findings", "Forecast", "Planner", "Question", "Replanner", "Rules"]

_LOOK_S = 1.0  # between two looks at a shift that is not settled: they take longer than a request


class Planner(Protocol):
    """Knows what a split would make of some traffic."""

    def search(self, traffic: Traffic, running: Split, stock: int) -> Findings:
        """The best split of at most `stock` instances for the traffic, with forecasts of it and of the running one."""
        ...


class Rules(msgspec.Struct, frozen=True, kw_only=True):
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


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to search a plan for."""

    shifts: tuple[Shift, ...]
    traffic: Traffic


class Replanner:
    """The state between two decisions. Times are seconds on the caller's clock."""

    def __init__(self, watch: TrafficWatch, rules: Rules | None = None) -> None:
        self.watch = watch
        self.rules = rules or Rules()
        self.log: list[Decision] = []
        self._asked: Question | None = None
        self._alarmed_s: float | None = None
        self._quiet_until_s = float("-inf")
        self._look_s = float("-inf")

    def question(self, made: Callable[[int], int], now: float) -> Question | None:
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
        self._asked = Question(shifts=tuple(shifts), traffic=traffic)
        return self._asked

    def answer(self, findings: Findings, pools: Pools, retired: Sequence[str], now: float) -> Decision:
        """Decide by what the search for the last question found; `retired` are instances that may be started."""
        question = self._asked
        if question is None:
            raise RuntimeError("nobody has asked")
        outcome = self._weigh(findings)
        steps = steps_to(findings.best.split, pools, retired) if outcome is Outcome.MOVE else ()
        return self._decide(question, outcome, findings, steps, now)

    def give_up(self, reason: str, now: float) -> Decision:
        """There is no answer to the last question, and why: everything stays as it is."""
        question = self._asked
        if question is None:
            raise RuntimeError("nobody has asked")
        return self._decide(question, Outcome.FAILED, None, (), now, reason)

    def _weigh(self, findings: Findings) -> Outcome:
        best, running = findings.best, findings.running
        if best.split == running.split:
            return Outcome.BEST_ALREADY
        # A planner proposes fewer instances only where they are enough.
        saves = best.split.instances < running.split.instances
        gains = best.attainment - running.attainment >= self.rules.min_gain
        return Outcome.MOVE if saves or gains else Outcome.TOO_LITTLE

    def _decide(
        self,
        question: Question,
        outcome: Outcome,
        findings: Findings | None,
        steps: tuple[Step, ...],
        now: float,
        reason: str = "",
    ) -> Decision:
        decision = Decision(
            at_s=now,
            shifts=question.shifts,
            rate=question.traffic.rate,
            outcome=outcome,
            findings=findings,
            steps=steps,
            reason=reason,
        )
        starts = any(step.action is Action.START for step in steps)
        self._quiet_until_s = now + self.rules.min_between_s + (self.rules.start_up_s if starts else 0.0)
        self._asked = None
        self.log.append(decision)
        return decision
