"""Overload control in the simulator."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import CATALOG, ToyRun, clusters, pools, workloads
from twofold.cluster.overload import overload_control
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.cluster.timing import PS
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.request import FinishReason, Request
from twofold.scheduling.admission.ledger import InstanceCapacity, OverloadLedger
from twofold.scheduling.admission.overload import OVERLOAD_RULES, OverloadControl, create_overload_rule
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS
from twofold.simulation.overload import DECODE, PREFILL, SimulatedOverload, correlation
from twofold.simulation.series import Series
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.timeline import Moment

SLO = Slo(ttft_s=2.0, tpot_s=0.05)
SPEC = ClusterSpec(
    pools=pools((1, Role.PREFILL), (1, Role.DECODE)), model="llama2-70b", router="jsq", handoff="serialized"
)


def overloaded(rate, count=200, prompt=1500, output=60):
    return [
        Request(id=str(number), arrival_s=number / rate, prompt_tokens=prompt, output_tokens=output)
        for number in range(count)
    ]


def attach(rule, model, ttft_s, tbt_s):
    def prepare(cluster):
        facts = {
            name: InstanceCapacity(
                model=model, max_num_batched_tokens=100, max_num_seqs=8, capacity_tokens=cluster.capacities[name]
            )
            for name in cluster.instances
        }
        ledger = OverloadLedger(cluster.scheduler.pools, facts, ttft_s=ttft_s, tbt_s=tbt_s)
        control = OverloadControl(create_overload_rule(rule), ledger)
        cluster.overload = SimulatedOverload(rule, control)
        cluster.events.subscribe(ledger)

    return prepare


def splits(drawn):
    spec = drawn[0]
    roles = {pool.role for pool in spec.pools}
    return Role.MIXED not in roles and spec.router in FIXED_ROLE_ROUTERS and spec.rules == "twofold"


@settings(max_examples=120)
@given(
    clusters().filter(splits),
    workloads(),
    st.sampled_from(list(OVERLOAD_RULES)),
    st.sampled_from([0.05, 0.2, 1.0]),
    st.sampled_from([0.003, 0.006, 1.0]),
)
def test_every_request_ends_and_rejected_ones_are_not_computed(drawn, requests, rule, ttft_s, tbt_s):
    spec, batchers, model, capacity = drawn
    world = ToyRun(
        spec, requests, model=model, capacity=capacity, batchers=batchers, prepare=attach(rule, model, ttft_s, tbt_s)
    )
    counts, overload = world.statistics, world.cluster.overload
    assert not world.cluster.requests
    assert counts.arrived == counts.completed + counts.rejected + counts.failed == len(requests)
    ended = [timeline.request.id for timeline in world.ends.timelines]
    assert len(ended) == len(set(ended)) == len(requests)
    result = overload.result()
    wasted = [
        timeline.request.prompt_tokens
        for timeline in world.ends.timelines
        if timeline.finish_reason is FinishReason.ERROR and Moment.FIRST_TOKEN in timeline.moments
    ]
    after = sum(count for why, count in result.refusals.items() if why.endswith("-after-prefill"))
    if not spec.failures:
        assert (len(wasted), sum(wasted)) == (after, result.wasted_prefill_tokens)
        started = [t for t in world.ends.timelines if Moment.PREFILL_STARTED in t.moments]
        assert len(started) == counts.completed + after
    assert sum(result.refusals.values()) <= counts.rejected
    assert rule != "none" or not result.refusals
    assert overload.control.ledger.loads(world.cluster.kernel.now / PS) == (0.0, 0.0)
    for instance in world.cluster.instances.values():
        assert instance.scheduler.status().idle or instance.load is None
    for load in world.cluster.scheduler.pools:
        assert (load.pending_prefill_tokens, load.reserved_tokens, load.requests) == (0, 0, 0)


@settings(max_examples=40)
@given(clusters().filter(splits), workloads())
def test_the_rule_none_changes_nothing(drawn, requests):
    spec, batchers, model, capacity = drawn
    how = {"model": model, "capacity": capacity, "batchers": batchers}
    watched = ToyRun(spec, requests, prepare=attach("none", model, 1.0, 1.0), **how)
    assert watched.facts() == ToyRun(spec, requests, **how).facts()


@pytest.mark.parametrize("rule", ["baseline", "early", "predicted"])
def test_admitted_requests_meet_the_slo(rule):
    free = simulate(SPEC, overloaded(40.0), catalog=CATALOG, slo=SLO)
    assert free.ttft_s.percentile(90) > SLO.ttft_s
    result = simulate(SPEC, overloaded(40.0), catalog=CATALOG, slo=SLO, overload=rule)
    assert 0 < result.rejected < result.arrived
    assert result.ttft_s.percentile(100) <= SLO.ttft_s * 1.001
    assert result.tpot_s.percentile(90) <= SLO.tpot_s


def test_baseline_wastes_prefills_and_predicted_does_not():
    slo = Slo(ttft_s=2.0, tpot_s=0.032)
    wasted = {
        rule: simulate(
            SPEC, overloaded(4.0, output=400), catalog=CATALOG, slo=slo, overload=rule
        ).overload.wasted_prefill_tokens
        for rule in ("baseline", "early", "predicted")
    }
    assert wasted["baseline"] > 0
    assert wasted["predicted"] <= wasted["early"] < wasted["baseline"]


def test_no_overload_result_without_a_rule():
    watched = simulate(SPEC, overloaded(2.0, 20), catalog=CATALOG, slo=SLO, overload="none")
    plain = simulate(SPEC, overloaded(2.0, 20), catalog=CATALOG, slo=SLO)
    assert plain.overload is None
    assert {PREFILL, DECODE} == watched.series.keys() - plain.series.keys()
    same = msgspec.structs.replace(
        watched,
        overload=None,
        cpu_s=plain.cpu_s,
        series={name: series for name, series in watched.series.items() if name in plain.series},
    )
    assert same == plain


@pytest.mark.parametrize(
    ("changed", "slo", "reason"),
    [
        ({}, None, "needs both bounds"),
        ({}, Slo(ttft_s=1.0), "needs both bounds"),
        ({"router": "splitwise"}, SLO, "fixed roles, not splitwise"),
        ({"pools": pools((1, Role.PREFILL), (1, Role.MIXED))}, SLO, "not support mixed pools"),
    ],
)
def test_rejects_unsupported_clusters(changed, slo, reason):
    spec = msgspec.structs.replace(SPEC, **changed)
    with pytest.raises(ConfigurationError, match=reason):
        simulate(spec, overloaded(1.0, 1), catalog=CATALOG, slo=slo, overload="early")


def test_rejects_an_unknown_rule():
    with pytest.raises(ConfigurationError, match="unknown overload rule 'late'"):
        overload_control("late", SPEC, instance_profiles(SPEC, CATALOG), SLO, None)


def test_correlation_is_pearsons():
    up, down, flat = Series(), Series(), Series()
    for second in range(100):
        up.set(second * PS, float(second % 10))
        down.set(second * PS, float(-2 * (second % 10)))
        flat.set(second * PS, 1.0)
    assert correlation(up, up) == pytest.approx(1.0)
    assert correlation(up, down) == pytest.approx(-1.0)
    assert correlation(up, flat) is None
    assert correlation(Series(), Series()) is None
