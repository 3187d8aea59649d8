"""The search for the best numbers of prefill and decode instances."""

import msgspec
import pytest

from support.toy import CATALOG
from twofold.cluster.file import parse_cluster
from twofold.errors import ConfigurationError
from twofold.planning.splits import SplitPlanner, synthetic_requests
from twofold.scheduling.replan.replanner import RoleSplit
from twofold.scheduling.replan.traffic import TrafficSample
from twofold.slo import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def of(rate, prompt, output):
    return TrafficSample(rate=rate, burstiness=1.0, prompt_tokens=(prompt,), output_tokens=(output,))


PROMPTS, OUTPUTS = of(8.0, 1500, 40), of(14.0, 400, 200)


def planner(text="2xh100:prefill,2xh100:decode", **how):
    spec = msgspec.structs.replace(parse_cluster(text, model="llama2-70b", catalog=CATALOG), router="jsq-planned")
    return SplitPlanner(spec, CATALOG, SLO, **how)


def test_the_split_follows_the_traffic():
    """For long outputs, the search picks three decode instances and one prefill instance."""
    found = planner().search(OUTPUTS, RoleSplit(3, 1), stock=4)
    assert found.best.split == RoleSplit(1, 3)
    assert found.best.attainment > 0.9 > found.running.attainment
    assert {each.split for each in found.searched} == {RoleSplit(1, 3), RoleSplit(2, 2), RoleSplit(3, 1)}
    assert found.running in found.searched
    assert found.requests == 840


def test_the_split_that_runs_is_kept_where_none_is_better():
    # Light traffic is served equally well by every split.
    for running in (RoleSplit(1, 3), RoleSplit(2, 2)):
        assert planner().search(of(1.0, 500, 20), running, stock=4).best.split == running


def test_as_few_replicas_as_are_enough():
    wide = planner("2xh100:prefill,6xh100:decode", replicas=True)
    few = wide.search(of(1.0, 500, 20), RoleSplit(2, 2), stock=8).best
    assert few.split.instances == 2
    more = wide.search(of(30.0, 400, 200), RoleSplit(2, 2), stock=8).best
    assert more.split.instances > 4
    assert more.attainment > 0.9


def test_more_splits_than_are_tried_are_bisected():
    """Of eleven possible splits, the search simulates fewer than eight."""
    wide = planner("6xh100:prefill,6xh100:decode")
    found = wide.search(of(40.0, 400, 200), RoleSplit(6, 6), stock=12)
    assert len(found.searched) < 8
    assert found.best.attainment > 0.9


def test_an_overload_is_served_as_well_as_can_be():
    """If no split reaches the required SLO attainment, the search returns the split with the highest attainment."""
    found = planner("2xh100:prefill,2xh100:decode", replicas=True).search(
        of(200.0, 1500, 200), RoleSplit(2, 2), stock=4
    )
    assert found.best.attainment == max(each.attainment for each in found.searched)


def test_requests_are_like_the_traffic_and_the_same_each_time():
    traffic = TrafficSample(rate=20.0, burstiness=0.5, prompt_tokens=(10, 20, 30), output_tokens=(1, 2))
    requests = list(synthetic_requests(traffic))
    assert len(requests) == 1200
    assert requests == list(synthetic_requests(traffic))
    assert requests[-1].arrival_s == pytest.approx(60.0, rel=0.2)
    assert {each.prompt_tokens for each in requests} == {10, 20, 30}
    assert {each.output_tokens for each in requests} == {1, 2}
    assert [len(list(synthetic_requests(of(rate, 1, 1)))) for rate in (0.1, 1e3)] == [400, 3000]


def test_an_slo_without_bounds_is_no_aim():
    """An SLO without any latency bound raises ConfigurationError."""
    spec = parse_cluster("1xh100:prefill,1xh100:decode", model="llama2-70b", catalog=CATALOG)
    with pytest.raises(ConfigurationError, match="needs an SLO in seconds"):
        SplitPlanner(spec, CATALOG, Slo())
