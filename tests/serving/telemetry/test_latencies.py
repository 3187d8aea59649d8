"""Latency histograms over a sliding window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.timelines import request_timeline
from twofold.serving.telemetry.latencies import BIN_S, HISTORY, RANKS, LatencyHistogram, LatencyWindow
from twofold.slo import Slo

latency = st.floats(1e-4, 1e3)


@given(st.lists(latency, min_size=1, max_size=200))
def test_percentiles_are_within_five_percent(latencies):
    histogram = LatencyHistogram()
    histogram.add(np.array(latencies), 1.0)
    expected = np.percentile(latencies, [100 * rank for rank in RANKS], method="inverted_cdf")
    assert histogram.percentiles() == pytest.approx(list(expected), rel=0.052)


@given(st.lists(st.lists(latency, max_size=20), max_size=5))
def test_the_sum_of_histograms_equals_one_histogram(groups):
    together, apart = LatencyHistogram(), []
    for group in groups:
        apart.append(LatencyHistogram())
        apart[-1].add(np.array(group), 1.0)
        together.add(np.array(group), 1.0)
    total = LatencyHistogram.sum(apart)
    assert (total.count, total.within) == (together.count, together.within)
    assert total.buckets.tolist() == together.buckets.tolist()


def test_latencies_beyond_all_buckets_are_counted():
    histogram = LatencyHistogram()
    histogram.add(np.array([1e-9] * 50 + [1e9] * 50), 1.0)
    shortest, longest, _ = histogram.percentiles()
    assert shortest == pytest.approx(1e-5, rel=0.1)
    assert longest > 1700


def test_tokens_of_live_requests_are_counted_once():
    latencies = LatencyWindow(Slo(ttft_s=2.0, tpot_s=1.0), 0.0, bin_s=5.0)
    timeline = request_timeline([4.0, 4.5, 6.0], reason=None)
    latencies.take([timeline])
    latencies.take([timeline])
    assert latencies.flow(6.0).tokens == [2, 1]
    timeline.token_times_s.append(7.0)
    latencies.take([timeline])
    latencies.end(timeline, 7.0, good=False)
    flow, recent = latencies.flow(7.0), latencies.recent(7.0, 60.0)
    assert (flow.tokens, flow.requests, flow.good) == ([2, 2], [0, 1], [0, 0])
    assert (recent.ttft.count, recent.ttft.within, recent.itl.count) == (1, 0.0, 3)
    assert recent.itl.within == pytest.approx(2 / 3)
    assert recent.tokens_per_s == pytest.approx(4 / 7)


def test_old_bins_are_dropped():
    latencies = LatencyWindow(Slo(), 0.0, bin_s=5.0, bins=4)
    early, late = request_timeline([1.5]), request_timeline([2.0, 1e6 + 1], name="late")
    latencies.take([early])
    latencies.end(early, 2.0, good=True)
    assert latencies.flow(19.0).requests == [1, 0, 0, 0]
    assert latencies.flow(20.0).requests == [0, 0, 0, 0]
    assert latencies.flow(1e6).requests == [0, 0, 0, 0]
    latencies.take([late])
    latencies.end(late, 1e6 + 1, good=True)
    assert latencies.flow(1e6 + 1).tokens == [0, 0, 0, 1]


def test_an_empty_window_has_no_percentiles():
    recent = LatencyWindow(Slo(), 0.0).recent(1.0, 60.0)
    assert (recent.good, recent.ttft.p50_s, recent.ttft.within, recent.requests) == (None, None, None, 0)


def test_the_history_covers_six_hours_and_is_bounded():
    latencies = LatencyWindow(Slo(), 0.0)
    for number in range(HISTORY + 50):
        at = BIN_S * number + 1.0
        timeline = request_timeline([at], name=str(number), arrived=at)
        latencies.take([timeline])
        latencies.end(timeline, at, good=True)
    assert BIN_S * HISTORY == 6 * 3600
    assert latencies.flow(at).requests == [1] * HISTORY
    assert latencies.flow(at, 30).requests == [1] * 30
