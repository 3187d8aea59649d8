"""Snapshots of a service: its state and recent history."""

import msgspec
import pytest

from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.errors import InstanceLostError, RequestError
from twofold.instance import Role
from twofold.request import FinishReason
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.telemetry.snapshot import InstanceState, ServiceHistory, ServiceSnapshot
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.slo import Slo


def status(**counts):
    return InstanceStatus(**(dict.fromkeys(InstanceStatus.__struct_fields__, 0) | counts))


class TimedTelemetry(Telemetry):
    """Telemetry with a clock that the test sets."""

    def __init__(self):
        self.now = 100.0
        super().__init__("tiny", slo=Slo(ttft_s=2.0), clock=lambda: self.now)

    def at(self, now):
        """Set the clock and return the instance telemetry."""
        self.now = now
        return self.instances

    def seen(self, now, *live):
        """Set the clock and return a snapshot of the service."""
        self.now = now
        return self.snapshot(live)


@pytest.fixture
def telemetry():
    telemetry = TimedTelemetry()
    telemetry.at(100.0).role("prefill-0", Role.PREFILL)
    telemetry.at(100.1).state("prefill-0", InstanceState.UP)
    telemetry.at(100.1).status("prefill-0", status(blocks_total=10, blocks_free=10))
    return telemetry


def only(snapshot):
    (instance,) = snapshot.instances
    return instance


def test_series_have_one_sample_per_second(telemetry):
    """Batch sizes are averaged over each second; gauges are sampled at the end of each second."""
    telemetry.at(100.5).status("prefill-0", status(waiting=2, running=1, blocks_total=10, blocks_free=4))
    telemetry.at(100.6).step("prefill-0", 1)
    telemetry.at(100.7).step("prefill-0", 2)
    telemetry.at(102.5).status("prefill-0", status(waiting=1, running=1, blocks_total=10, blocks_free=5))
    series = only(telemetry.seen(103.5)).series
    assert series.batch == [1.5, 2, 2]
    assert series.waiting == [2, 2, 1]
    assert series.kv_used == [0.6, 0.6, 0.5]


def test_series_are_bounded(telemetry):
    telemetry.at(100.5).status("prefill-0", status(waiting=1, blocks_total=10, blocks_free=4))
    series = only(telemetry.seen(1e6)).series
    assert (series.batch, series.waiting) == ([0] * 300, [1] * 300)


def test_role_changes_are_recorded(telemetry):
    telemetry.at(101.0).role("prefill-0", Role.MIXED)
    telemetry.at(102.0).role("prefill-0", Role.MIXED)
    snapshot = telemetry.seen(103.0)
    instance = only(snapshot)
    assert (instance.role, instance.home) == (Role.MIXED, Role.PREFILL)
    assert [(span.role.value, span.since_s) for span in instance.roles] == [("prefill", 100.0), ("mixed", 101.0)]
    assert [event.text for event in snapshot.events] == ["prefill → mixed"]


def test_a_lost_instance_is_empty_until_it_returns(telemetry):
    telemetry.at(101.0).status("prefill-0", status(waiting=3, blocks_total=10, blocks_free=1))
    telemetry.at(102.0).remove("prefill-0")
    lost = only(telemetry.seen(102.0))
    assert (lost.state, lost.status.waiting, lost.status.blocks_total) == (InstanceState.LOST, 0, 0)
    telemetry.at(103.0).restarted("prefill-0")
    telemetry.at(104.0).role("prefill-0", Role.PREFILL)
    telemetry.at(104.0).state("prefill-0", InstanceState.UP)
    back = telemetry.seen(105.0)
    assert (only(back).state, only(back).restarts, back.totals["restarts"]) == (InstanceState.UP, 1, 1)
    assert [event.text for event in back.events] == ["lost", "restarted"]


def test_reports_of_unknown_instances_are_ignored(telemetry):
    telemetry.at(101.0).status("ghost", status())
    telemetry.at(101.0).state("ghost", InstanceState.UP)
    telemetry.at(101.0).step("ghost", 1)
    assert only(telemetry.seen(101.0)).instance == "prefill-0"


def test_requests_are_listed_by_arrival(telemetry):
    for number in range(4):
        telemetry.ended(
            request_timeline([102.5 + number], name=str(number), arrived=101.0 + number, prefill_started=102.0), 104
        )
    alive = request_timeline([103.0], name="alive", arrived=102.5, reason=None, prefill_started=102.8, routed=102.6)
    snapshot = telemetry.seen(106.0, alive)
    assert [request.id for request in snapshot.requests] == ["0", "1", "alive", "2", "3"]
    assert snapshot.totals["ended_length"] == 4
    assert (snapshot.recent.good, snapshot.recent.ttft.count) == (1.0, 5)


def test_finished_requests_are_bounded(telemetry):
    for number in range(202):
        telemetry.ended(request_timeline([102.5], name=str(number), arrived=101.0 + number / 1000), 103.0)
    assert [request.id for request in telemetry.seen(106.0).requests] == [str(number) for number in range(2, 202)]


def test_prompts_not_waiting_on_an_instance_count_as_prefilling(telemetry):
    telemetry.at(101.0).status("prefill-0", status(waiting=1, running=1, blocks_total=10, blocks_free=4))
    live = [
        request_timeline(name="held", reason=None),
        request_timeline(name="a", reason=None, routed=101.0),
        request_timeline(name="b", reason=None, routed=101.0),
        request_timeline([101.5], name="c", reason=None, routed=101.0, prefill_started=101.2),
        request_timeline([4.0, 6.0], name="d", reason=None, **SPLIT_MOMENTS),
    ]
    phases = telemetry.seen(102.0, *live).phases
    assert phases == {"held": 1, "queue": 1, "prefill": 1, "hand-off": 1, "decode queue": 0, "decode": 1}


def test_failed_requests_do_not_meet_the_slo(telemetry):
    telemetry.ended(request_timeline([101.5], name="x", arrived=101.0, reason=FinishReason.ERROR), 102.0)
    assert telemetry.seen(103.0).recent.good == 0.0


def test_the_snapshot_round_trips_through_json(telemetry):
    telemetry.ended(request_timeline([102.5], arrived=101.0), 103.0)
    snapshot = telemetry.seen(104.0)
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=ServiceSnapshot) == snapshot


def test_the_history_has_pools_and_host_beside_the_requests(telemetry):
    telemetry.at(100.1).role("prefill-1", Role.PREFILL)
    telemetry.at(100.1).status("prefill-1", status(blocks_total=10, blocks_free=10))
    for second in range(20):
        telemetry.at(100.5 + second).status("prefill-0", status(waiting=2, running=1, blocks_total=10, blocks_free=5))
        telemetry.at(100.6 + second).step("prefill-0", 4)
    telemetry.at(115.0).role("prefill-1", Role.DECODE)
    telemetry.ended(request_timeline([102.5, 103.0], arrived=101.0), 103.0)
    telemetry.now = 128.0
    history = telemetry.history(())
    assert (history.first, history.flow.requests, history.flow.tokens) == (0, [1, 0, 0], [2, 0, 0])
    one, two = history.samples
    assert (one.number, one.pools) == (0, {Role.PREFILL: (2.0, 2.0, 0.25)})
    assert (two.number, two.pools) == (1, {Role.PREFILL: (4.0, 2.0, 0.5), Role.DECODE: (0.0, 0.0, 0.0)})
    assert 0.0 <= one.cpu <= 1.0
    assert 0.0 < one.memory < 1.0
    assert msgspec.json.decode(msgspec.json.encode(history), type=ServiceHistory) == history


def test_a_pause_leaves_a_gap_in_the_history(telemetry):
    telemetry.at(111.0).status("prefill-0", status(blocks_total=10, blocks_free=10))
    telemetry.now = 145.0
    history = telemetry.history(())
    assert [sample.number for sample in history.samples] == [0, 3]
    assert len(history.flow.tokens) == 5
    telemetry.now = 7 * 3600.0
    assert telemetry.history(()).first == (7 * 3600 - 100) // 10 + 1 - len(telemetry.history(()).flow.tokens) > 0


def test_failures_are_counted_by_reason(telemetry):
    telemetry.failed(RequestError("late", status=504, code="deadline_exceeded"))
    telemetry.failed(RequestError("bad", status=500))
    telemetry.failed(InstanceLostError("gone"))
    totals = telemetry.seen(102.0).totals
    assert {name: totals[name] for name in totals if name.startswith("failed_")} == {
        "failed_deadline_exceeded": 1,
        "failed_other": 1,
        "failed_instance_lost": 1,
    }
    assert b'request_failures_total{reason="instance_lost"} 1.0' in telemetry.exposition()
