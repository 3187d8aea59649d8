"""The timeline of a request, and its recorder."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.events import Recorder
from twofold.request import FinishReason, Request, RequestTimings
from twofold.slo import Slo
from twofold.timeline import Moment

TOKEN_MOMENTS = (Moment.FIRST_TOKEN, Moment.LAST_TOKEN)
REQUEST = Request(id="r", arrival_s=1.0, prompt_tokens=10, output_tokens=3)


def recorded(tokens, **moments):
    recorder = Recorder()
    recorder.arrive(REQUEST, 1.0)
    for name, at in moments.items():
        recorder.mark("r", Moment(name), at)
    for at in tokens:
        recorder.token("r", at)
    timeline = recorder.end("r", FinishReason.LENGTH)
    assert timeline is not None
    return timeline


def test_spans_of_a_split_request():
    timeline = recorded(
        [4.0, 6.0, 7.0], prefill_started=2.0, handoff_started=2.5, handoff_ended=4.5, decode_started=5.0
    )
    assert (timeline.ttft_s, timeline.e2e_s, timeline.tpot_s, timeline.itl_s) == (3.0, 6.0, 1.5, [2.0, 1.0])
    assert (timeline.queue_prefill_s, timeline.prefill_s, timeline.queue_decode_s) == (1.0, 2.0, 0.5)
    assert (timeline.transfer_s, timeline.visible_transfer_s) == (2.0, 0.5)


def test_a_hidden_transfer_is_not_visible():
    """A KV transfer that ends before the first token adds no visible transfer time."""
    timeline = recorded([4.0, 5.0], handoff_started=2.0, handoff_ended=3.0, decode_started=4.0)
    assert (timeline.visible_transfer_s, timeline.queue_decode_s) == (0.0, 0.0)


def test_missing_spans_are_none():
    timeline = recorded([4.0])
    assert timeline.tpot_s is None
    assert timeline.transfer_s is None
    assert timeline.itl_s == []


def test_late_reports_are_dropped():
    ended = []
    recorder = Recorder([ended.append])
    recorder.arrive(REQUEST, 1.0)
    recorder.end("r", FinishReason.ABORT)
    recorder.token("r", 2.0)
    recorder.mark("r", Moment.DECODE_STARTED, 2.0)
    assert recorder.end("r", FinishReason.LENGTH) is None
    assert [timeline.finish_reason for timeline in ended] == [FinishReason.ABORT]
    assert not recorder.live


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=30))
def test_tpot_is_the_mean_gap_and_spans_add_up(gaps):
    times = [2.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    timeline = recorded(times)
    total = sum(timeline.itl_s)
    assert abs(timeline.tpot_s - total / len(gaps)) < 1e-9
    assert abs(timeline.e2e_s - timeline.ttft_s - total) < 1e-9


def test_all_bounds_must_hold():
    timeline = recorded([4.0, 6.0, 7.0])
    assert Slo(ttft_s=3.0, tpot_s=1.5, e2e_s=6.0).met_by(timeline)
    assert not Slo(ttft_s=3.0, tpot_s=1.4).met_by(timeline)
    assert Slo().met_by(timeline)


def test_incomplete_requests_miss_the_slo():
    recorder = Recorder()
    recorder.arrive(REQUEST, 1.0)
    timeline = recorder.end("r", FinishReason.ERROR)
    assert timeline is not None
    assert not Slo(ttft_s=3.0).met_by(timeline)


def test_phases_of_a_split_request():
    timings = recorded(
        [4.0, 6.0, 7.0], routed=1.25, prefill_started=2.0, handoff_started=2.5, handoff_ended=4.5, decode_started=5.0
    ).timings
    assert (timings.gateway_queue_s, timings.prefill_queue_s, timings.prefill_s) == (0.25, 0.75, 2.0)
    assert (timings.kv_transfer_hidden_s, timings.kv_transfer_visible_s) == (1.5, 0.5)
    assert (timings.decode_queue_s, timings.first_decode_s) == (0.5, 1.0)


def test_a_request_without_a_handoff_has_no_transfer():
    timings = recorded([4.0, 6.0], routed=1.0, prefill_started=2.0, decode_started=5.0).timings
    assert (timings.kv_transfer_hidden_s, timings.kv_transfer_visible_s) == (None, None)
    assert (timings.decode_queue_s, timings.first_decode_s, timings.first_gap_s) == (1.0, 1.0, 2.0)


def test_phases_are_unknown_before_their_tokens():
    assert recorded([], routed=1.0).timings == RequestTimings()
    first_only = recorded([4.0], routed=1.0).timings
    assert (first_only.ttft_s, first_only.decode_queue_s, first_only.first_gap_s) == (3.0, None, None)


@given(
    tokens=st.lists(st.floats(1.0, 100.0), min_size=2, max_size=4).map(sorted),
    moments=st.dictionaries(
        st.sampled_from([each for each in Moment if each not in {Moment.ARRIVED, *TOKEN_MOMENTS}]),
        st.floats(0.0, 110.0),
    ),
)
def test_parts_sum_to_the_ttft_and_the_first_gap(tokens, moments):
    """The sums hold with any recorded moments, even if the clocks of hosts disagree about their order."""
    timeline = recorded(tokens, **moments)
    parts = [value for value in msgspec.structs.asdict(timeline.timings).values() if value is not None]
    assert min(parts) >= 0.0
    assert timeline.timings.ttft_s == pytest.approx(timeline.ttft_s)
    assert timeline.timings.first_gap_s == pytest.approx(timeline.itl_s[0])
