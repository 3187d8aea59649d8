"""The replanner, which decides when to search for better numbers of prefill and decode instances."""

from math import exp
from random import Random

import pytest

from support.routed import cluster
from twofold.instance import Role
from twofold.scheduling.replan.replanner import (
    ReplanAction,
    Replanner,
    ReplanOutcome,
    ReplanRules,
    RoleSplit,
    SearchResult,
    SplitForecast,
)
from twofold.scheduling.replan.traffic import TrafficMonitor

RULES = ReplanRules(min_gain=0.05, min_between_s=60.0, patience_s=20.0, start_up_s=30.0)
POOLS = cluster([Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.DECODE], "jsq-planned").pools


class World:
    """Random traffic and a replanner."""

    def __init__(self, output_s=0.0):
        self.replanner, self.now, self.output_s = Replanner(TrafficMonitor(), RULES), 0.0, output_s
        self.draw, self.open = Random(0), []

    def run(self, rate, seconds, output=100):
        """Generate traffic until the replanner requests a new plan, for at most `seconds` seconds.

        Return the traffic to plan for, or None if the replanner requests no plan.
        """
        end, watch = self.now + seconds, self.replanner.monitor
        while self.now < end:
            self.now += self.draw.expovariate(rate)
            while self.open and self.open[0][0] < self.now:
                watch.ended(*self.open.pop(0)[1:])
            tokens = round(output * exp(self.draw.gauss(0, 1)))
            self.open.append((self.now + self.output_s, watch.arrived(500, self.now), tokens))
            question = self.replanner.query(lambda _: 1, self.now)
            if question is not None:
                return question
        return None

    def answer(self, best, attainment, running=0.5, retired=()):
        forecasts = SplitForecast(RoleSplit(3, 1), running), SplitForecast(best, attainment)
        findings = SearchResult(running=forecasts[0], best=forecasts[1], searched=forecasts, requests=600, cpu_s=1.0)
        return self.replanner.decide(findings, POOLS, retired, self.now)


@pytest.fixture
def shifted():
    world = World()
    assert world.run(10, 300) is None
    assert world.run(25, 60) is not None
    return world


def test_query_has_the_new_traffic():
    world = World()
    assert world.run(10, 300) is None
    question = world.run(25, 60)
    assert question.rate == pytest.approx(25, rel=0.25)
    assert world.now < 320.0
    assert world.run(25, 300) is None, "it waits for an answer"


def test_moves_for_a_gain(shifted):
    decision = shifted.answer(RoleSplit(1, 3), 0.95)
    assert decision.outcome is ReplanOutcome.MOVE
    assert [(step.action, step.role) for step in decision.steps] == [(ReplanAction.ROLE, Role.DECODE)] * 2
    assert shifted.replanner.log == [decision]


@pytest.mark.parametrize(
    ("best", "attainment", "outcome"),
    [
        (RoleSplit(2, 2), 0.54, ReplanOutcome.TOO_LITTLE),
        (RoleSplit(3, 1), 0.5, ReplanOutcome.BEST_ALREADY),
        (RoleSplit(1, 1), 0.5, ReplanOutcome.MOVE),  # two instances fewer
        (RoleSplit(4, 4), 0.54, ReplanOutcome.TOO_LITTLE),
    ],
)
def test_keeps_the_split_without_enough_gain(shifted, best, attainment, outcome):
    decision = shifted.answer(best, attainment)
    assert decision.outcome is outcome
    assert bool(decision.steps) == (outcome is ReplanOutcome.MOVE)


def test_decisions_are_min_between_s_apart():
    for best, retired, quiet_s in ((RoleSplit(1, 3), (), 60.0), (RoleSplit(3, 2), ("spare-0",), 90.0)):
        world = World()
        world.run(10, 300)
        world.run(25, 60)
        world.answer(best, 0.95, retired=retired)
        decided_s = world.now
        assert world.run(25, 15) is None
        assert world.run(8, 300) is not None
        assert decided_s + quiet_s <= world.now < decided_s + quiet_s + 30.0


def test_plans_after_patience_without_outputs():
    quick, slow = World(), World(output_s=40.0)
    asked_s = []
    for world in (quick, slow):
        assert world.run(10, 300) is None
        assert world.run(25, 60) is not None
        asked_s.append(world.now)
    assert asked_s[0] < 315.0
    assert asked_s[0] + 10.0 < asked_s[1] < asked_s[0] + RULES.patience_s + 10.0


def test_a_failed_search_keeps_the_split(shifted):
    decision = shifted.replanner.give_up("the search was ended after 60 s", shifted.now)
    assert decision.outcome is ReplanOutcome.FAILED
    assert decision.steps == ()
    assert "search failed: the search was ended after 60 s" in str(decision)
    assert shifted.run(25, 100) is None
    assert shifted.run(8, 100) is not None


def test_log_has_the_numbers(shifted):
    text = str(shifted.answer(RoleSplit(1, 3), 0.95))
    for part in ("requests/s", "times", "sigmas", "2 splits with 600 requests", "running 3P+1D"):
        assert part in text
    assert "50% within the SLO, 1P+3D 95%" in text
    assert "prefill-0 becomes decode, prefill-1 becomes decode" in text


def test_log_gives_the_reason_to_stay():
    world = World()
    world.run(10, 300)
    world.run(25, 60)
    assert "gain is too small" in str(world.answer(RoleSplit(2, 2), 0.52))


def test_rejects_a_decision_without_a_query():
    with pytest.raises(RuntimeError):
        World().answer(RoleSplit(1, 3), 0.95)
    with pytest.raises(RuntimeError):
        World().replanner.give_up("", 0.0)
