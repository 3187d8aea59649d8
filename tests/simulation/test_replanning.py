"""Re-planning of simulated clusters when the traffic shifts."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import CATALOG, ToyModel, ToyRun, pools, workloads
from twofold.cluster.file import parse_cluster
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.cluster.timing import PS
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.planning.splits import SplitPlanner
from twofold.request import Request
from twofold.scheduling.replan.replanner import (
    Replanner,
    ReplanOutcome,
    ReplanRules,
    RoleSplit,
    SearchResult,
    SplitForecast,
)
from twofold.scheduling.replan.traffic import TrafficMonitor
from twofold.simulation.kernel import EventOrder
from twofold.simulation.observers.base import Observer
from twofold.simulation.replanning import SimulatedReplanning, assign, require_movable
from twofold.simulation.simulate import simulate
from twofold.slo import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PROMPTS, OUTPUTS = (8.0, 1500, 40), (14.0, 400, 200)


def cluster(text="3xh100:prefill,1xh100:decode", router="jsq-planned"):
    return msgspec.structs.replace(parse_cluster(text, model="llama2-70b", catalog=CATALOG), router=router)


def traffic(*parts, seed=0):
    """Yield random requests for consecutive phases, each with its own rate, mean lengths and duration."""
    draw, now, end = Random(seed), 0.0, 0.0
    for (rate, prompt, output), seconds in parts:
        now, end = end, end + seconds
        while (now := now + draw.expovariate(rate)) < end:
            sizes = round(draw.gammavariate(2, prompt / 2)) + 1, round(draw.gammavariate(2, output / 2)) + 1
            yield Request(id=f"{now}", arrival_s=now, prompt_tokens=sizes[0], output_tokens=sizes[1])


class Seen(Observer):
    def __init__(self):
        self.timelines, self.roles, self.notes = [], [], []

    def ended(self, timeline, now):
        self.timelines.append(timeline)

    def role(self, instance, role, at_ps):
        if at_ps:
            self.roles.append((instance, role, at_ps / PS))

    def note(self, at_ps, kind, subject, detail):
        self.notes.append((kind, subject, detail))

    def share(self, begin_s, end_s):
        came = [each for each in self.timelines if begin_s <= each.request.arrival_s < end_s]
        return sum(SLO.met_by(each) for each in came) / len(came)


class Always:
    """Stub of the split planner that always recommends the same numbers of prefill and decode instances."""

    def __init__(self, split):
        self.split, self.asked = split, []

    def search(self, traffic, running, stock):
        self.asked.append((running, stock))
        forecasts = SplitForecast(running, 0.5), SplitForecast(self.split, 0.9)
        return SearchResult(running=forecasts[0], best=forecasts[1], searched=forecasts, requests=1, cpu_s=0.0)


def replanned(spec, requests, planner, *, search_s=5.0, spare=0, rules=None, **how):
    seen = Seen()
    replanning = SimulatedReplanning(Replanner(TrafficMonitor(), rules), planner, search_s=search_s, spare=spare)
    result = simulate(spec, requests, catalog=CATALOG, observers=[seen, replanning], prepare=replanning.attach, **how)
    return result, seen, replanning.log


@pytest.mark.parametrize("router", ["jsq-planned", "splitwise"])
def test_attainment_recovers_from_a_step(router):
    """A role change restores SLO attainment after a traffic shift."""
    spec, step_s = cluster(router=router), 120.0
    requests = list(traffic((PROMPTS, step_s), (OUTPUTS, 240.0)))
    _, seen, log = replanned(spec, requests, SplitPlanner(spec, CATALOG, SLO))
    (moved,) = [decision for decision in log if decision.steps]
    assert step_s < moved.at_s < step_s + 45.0
    assert moved.findings.best.split.decode > 1
    assert seen.share(0.0, step_s) > 0.9
    assert seen.share(moved.at_s + 60.0, step_s + 240.0) > 0.9
    assert [note[:2] for note in seen.notes] == [("replan", decision.outcome.value) for decision in log]
    before = Seen()
    simulate(spec, requests, catalog=CATALOG, observers=[before])
    assert before.share(moved.at_s + 60.0, step_s + 240.0) < 0.5


def test_monitoring_changes_nothing():
    spec, requests = cluster(), list(traffic((PROMPTS, 300.0)))
    watched, _, log = replanned(spec, requests, Always(RoleSplit(1, 3)))
    plain = simulate(spec, requests, catalog=CATALOG)
    assert log == []
    facts = [{**msgspec.to_builtins(result), "cpu_s": 0} for result in (watched, plain)]
    assert facts[0] == facts[1]


def test_a_search_takes_search_s():
    at_s = []
    for search_s in (0.0, 12.5):
        requests = traffic((PROMPTS, 120.0), (OUTPUTS, 60.0))
        _, seen, log = replanned(cluster(), requests, Always(RoleSplit(2, 2)), search_s=search_s)
        ((_, role, moved_s),) = seen.roles
        assert (role, moved_s) == (Role.DECODE, pytest.approx(log[0].at_s))
        at_s.append(log[0].at_s)
    assert at_s[1] - at_s[0] == pytest.approx(12.5)


def test_replicas_start_after_start_up_s():
    spec = cluster("2xh100:prefill,1xh100:decode,1xh100:decode")
    planner = Always(RoleSplit(1, 3))
    requests = traffic((PROMPTS, 120.0), (OUTPUTS, 120.0))
    _, seen, log = replanned(spec, requests, planner, spare=1, rules=ReplanRules(start_up_s=30.0))
    assert planner.asked[0] == (RoleSplit(2, 1), 4)
    role, start = log[0].steps
    assert (role.action.value, start.action.value, start.instance) == ("role", "start", "decode-1")
    used = [each for each in seen.timelines if "decode-1" in (each.prefill_instance, each.decode_instance)]
    assert min(each.request.arrival_s for each in used) >= log[0].at_s + 30.0


def test_retiring_replicas_finish_their_requests():
    requests = traffic((PROMPTS, 120.0), ((2.0, 300, 40), 240.0))
    result, seen, log = replanned(cluster(), requests, Always(RoleSplit(1, 1)))
    retired = {step.instance for step in log[0].steps if step.action.value == "retire"}
    assert len(retired) == 2
    assert result.completed == result.arrived
    late = [each for each in seen.timelines if each.request.arrival_s > log[0].at_s]
    assert retired.isdisjoint({name for each in late for name in (each.prefill_instance, each.decode_instance)})


def test_rejected_requests_count_as_arrivals():
    draw = list(traffic((PROMPTS, 120.0)))
    huge = [msgspec.structs.replace(each, prompt_tokens=10**8) if i % 3 else each for i, each in enumerate(draw)]
    result, _, _ = replanned(cluster(), huge, Always(RoleSplit(2, 2)))
    assert result.rejected > result.completed > 0


@pytest.mark.parametrize(
    ("text", "router", "says"),
    [
        ("1xh100:prefill,1xh100:decode", "jsq", "never moves an instance: re-plan with jsq-planned, splitwise"),
        ("1xh100:prefill,1xh100:decode,1xh100", "splitwise", "no mixed pool"),
        ("1xh100:prefill,1xa100:decode", "splitwise", "take each other's place"),
    ],
)
def test_rejects_clusters_without_interchangeable_instances(text, router, says):
    spec = cluster(text, router)
    with pytest.raises(ConfigurationError, match=says):
        require_movable(spec, instance_profiles(spec, CATALOG))


def test_assign_splits_an_idle_cluster():
    spec, splits = cluster("2xh100:prefill,3xh100:decode"), []

    def prepare(virtual):
        assign(virtual, RoleSplit(3, 1))
        splits.append(RoleSplit.of(virtual.scheduler.pools))

    simulate(spec, traffic((PROMPTS, 10.0)), catalog=CATALOG, prepare=prepare)
    assert splits == [RoleSplit(3, 1)]


moves = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3), st.sampled_from([Role.PREFILL, Role.DECODE, None])), max_size=30
)


@settings(max_examples=300)
@given(workloads(), moves, st.sampled_from(["jsq-planned", "splitwise"]), st.sampled_from([400, 600, 5000]))
def test_role_changes_lose_no_requests(requests, wanted, router, capacity):
    spec = ClusterSpec(
        pools=pools((2, Role.PREFILL), (2, Role.DECODE)),
        model="llama2-70b",
        router=router,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )

    def prepare(virtual):
        for at_ms, number, role in wanted:
            virtual.kernel.schedule(at_ms * PS // 1000, EventOrder.REPLAN, move, (virtual, number, role))

    def move(argument):
        virtual, number, role = argument
        name, scheduler = list(virtual.instances)[number], virtual.scheduler
        if role is None and RoleSplit.of(scheduler.pools).instances > 1:
            scheduler.pause(name)
        elif role is not None:
            scheduler.set_role(name, role)
            scheduler.resume(name)

    batchers = dict.fromkeys(Role, "splitwise")
    world = ToyRun(spec, requests, model=ToyModel(), capacity=capacity, batchers=batchers, prepare=prepare)
    assert not world.cluster.requests
    assert len({each.request.id for each in world.ends.timelines}) == len(requests)
    for instance in world.cluster.instances.values():
        assert instance.scheduler.status().idle
    for load in world.cluster.scheduler.pools:
        left = (load.pending_prefill_tokens, load.reserved_tokens, load.prefills, load.decodes, load.requests)
        assert left == (0, 0, 0, 0, 0)


def test_outcomes_are_noted_by_name():
    requests = traffic((PROMPTS, 120.0), (OUTPUTS, 60.0))
    _, seen, log = replanned(cluster(), requests, Always(RoleSplit(3, 1)))
    assert log[0].outcome is ReplanOutcome.BEST_ALREADY
    assert seen.notes[0][:2] == ("replan", "best-already")
