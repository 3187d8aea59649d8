"""The service's recent history."""

import msgspec
import pytest

from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.instance import Role
from twofold.request import FinishReason
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.telemetry.history import History
from twofold.serving.telemetry.snapshot import InstanceState, ServiceSnapshot
from twofold.slo import Slo


def status(**counts):
    return InstanceStatus(**(dict.fromkeys(InstanceStatus.__struct_fields__, 0) | counts))


@pytest.fixture
def history():
    history = History("tiny", Slo(ttft_s=2.0), start_s=100.0, seconds=5, requests=3)
    history.role("prefill-0", Role.PREFILL, 100.0)
    history.state("prefill-0", InstanceState.UP, 100.1)
    history.status("prefill-0", status(blocks_total=10, blocks_free=10), 100.1)
    return history


def only(snapshot):
    (instance,) = snapshot.instances
    return instance


def test_series_have_one_sample_per_second(history):
    """Batch sizes are averages; gauges are sampled at the end of each second."""
    history.status("prefill-0", status(waiting=2, running=1, blocks_total=10, blocks_free=4), 100.5)
    history.step("prefill-0", 1, 100.6)
    history.step("prefill-0", 2, 100.7)
    history.status("prefill-0", status(waiting=1, running=1, blocks_total=10, blocks_free=5), 102.5)
    series = only(history.snapshot([], 103.5)).series
    assert series.batch == [1.5, 2, 2]
    assert series.waiting == [2, 2, 1]
    assert series.kv_used == [0.6, 0.6, 0.5]


def test_series_are_bounded(history):
    history.status("prefill-0", status(waiting=1, blocks_total=10, blocks_free=4), 100.5)
    series = only(history.snapshot([], 1e6)).series
    assert (series.batch, series.waiting) == ([0] * 5, [1] * 5)


def test_role_changes_are_recorded(history):
    history.role("prefill-0", Role.MIXED, 101.0)
    history.role("prefill-0", Role.MIXED, 102.0)
    snapshot = history.snapshot([], 103.0)
    instance = only(snapshot)
    assert (instance.role, instance.home) == (Role.MIXED, Role.PREFILL)
    assert [(span.role.value, span.since_s) for span in instance.roles] == [("prefill", 100.0), ("mixed", 101.0)]
    assert [event.text for event in snapshot.events] == ["prefill → mixed"]


def test_a_lost_instance_is_empty_until_it_returns(history):
    history.status("prefill-0", status(waiting=3, blocks_total=10, blocks_free=1), 101.0)
    history.state("prefill-0", InstanceState.LOST, 102.0)
    lost = only(history.snapshot([], 102.0))
    assert (lost.state, lost.waiting, lost.blocks_total) == (InstanceState.LOST, 0, 0)
    history.restarted("prefill-0", 103.0)
    history.role("prefill-0", Role.PREFILL, 104.0)
    history.state("prefill-0", InstanceState.UP, 104.0)
    back = history.snapshot([], 105.0)
    assert (only(back).state, only(back).restarts, back.totals["restarts"]) == (InstanceState.UP, 1, 1)
    assert [event.text for event in back.events] == ["lost", "restarted"]


def test_reports_of_unknown_instances_are_ignored(history):
    history.status("ghost", status(), 101.0)
    history.state("ghost", InstanceState.UP, 101.0)
    history.step("ghost", 1, 101.0)
    assert only(history.snapshot([], 101.0)).instance == "prefill-0"


def test_requests_are_listed_by_arrival(history):
    for number in range(4):
        history.observe(
            request_timeline([102.5 + number], name=str(number), arrived=101.0 + number, prefill_started=102.0), 104
        )
    alive = request_timeline([103.0], name="alive", arrived=102.5, reason=None, prefill_started=102.8, routed=102.6)
    snapshot = history.snapshot([alive], 106.0)
    assert [request.id for request in snapshot.requests] == ["1", "alive", "2", "3"]
    assert snapshot.totals["ended_length"] == 4
    assert (snapshot.recent.good, snapshot.recent.ttft.count) == (1.0, 5)


def test_prompts_not_waiting_on_an_instance_count_as_prefilling(history):
    history.status("prefill-0", status(waiting=1, running=1, blocks_total=10, blocks_free=4), 101.0)
    live = [
        request_timeline(name="held", reason=None),
        request_timeline(name="a", reason=None, routed=101.0),
        request_timeline(name="b", reason=None, routed=101.0),
        request_timeline([101.5], name="c", reason=None, routed=101.0, prefill_started=101.2),
        request_timeline([4.0, 6.0], name="d", reason=None, **SPLIT_MOMENTS),
    ]
    phases = history.snapshot(live, 102.0).phases
    assert phases == {"held": 1, "queue": 1, "prefill": 1, "hand-off": 1, "decode queue": 0, "decode": 1}


def test_failed_requests_do_not_meet_the_slo(history):
    history.observe(request_timeline([101.5], name="x", arrived=101.0, reason=FinishReason.ERROR), 102.0)
    assert history.snapshot([], 103.0).recent.good == 0.0


def test_the_snapshot_round_trips_through_json(history):
    history.observe(request_timeline([102.5], arrived=101.0), 103.0)
    snapshot = history.snapshot([], 104.0)
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=ServiceSnapshot) == snapshot
