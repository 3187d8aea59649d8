"""Summaries of request timelines: counts, throughput, latencies and SLO attainment."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.events import Recorder
from twofold.reporting.summary import LatencyDistribution, Summary, summarize
from twofold.request import FinishReason, Request
from twofold.slo import Slo
from twofold.timeline import Moment

INFINITE = Slo(ttft_s=float("inf"), tpot_s=float("inf"), e2e_s=float("inf"))


def ended(name, arrived, tokens, reason=FinishReason.LENGTH, prompt_tokens=10):
    recorder = Recorder()
    request = Request(id=name, arrival_s=arrived, prompt_tokens=prompt_tokens, output_tokens=max(1, len(tokens)))
    recorder.arrive(request, arrived)
    for token in tokens:
        recorder.token(name, token)
    return recorder.end(name, reason)


def seconds(longest):
    """Return a Hypothesis strategy for times in whole microseconds, up to `longest` seconds."""
    return st.integers(0, longest * 1_000_000).map(lambda microseconds: microseconds / 1e6)


@st.composite
def runs(draw, reasons=tuple(FinishReason)):
    lines = []
    for number in range(draw(st.integers(0, 12))):
        arrived = draw(seconds(100))
        gaps = draw(st.lists(seconds(10), min_size=1, max_size=8))
        tokens = [arrived + sum(gaps[: place + 1]) for place in range(len(gaps))]
        lines.append(ended(str(number), arrived, tokens, draw(st.sampled_from(reasons))))
    return lines


def test_a_run_worked_out_by_hand():
    run = [ended("a", 0.0, [1.0, 2.0, 3.0]), ended("b", 1.0, [4.0, 6.0])]
    summary = summarize(run, slo=Slo(ttft_s=2.0))
    assert (summary.sent, summary.completed, summary.failed, summary.unfinished) == (2, 2, 0, 0)
    assert summary.duration_s == 6.0
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 5)
    assert summary.request_throughput == pytest.approx(2 / 6)
    assert summary.output_token_throughput == pytest.approx(5 / 6)
    assert summary.total_token_throughput == pytest.approx(25 / 6)
    assert (summary.ttft_s.mean, summary.ttft_s.p50, summary.ttft_s.max) == (2.0, 2.0, 3.0)
    assert (summary.itl_s.p50, summary.itl_s.max) == (1.0, 2.0)
    assert (summary.tpot_s.p50, summary.e2e_s.max) == (1.5, 5.0)
    assert (summary.slo_attainment, summary.goodput) == (0.5, pytest.approx(1 / 6))


def test_percentiles_are_numpys_linear_ones():
    """P99 of the values 0 to 10 is 9.9."""
    distribution = LatencyDistribution.of(float(value) for value in range(11))
    assert (distribution.p50, distribution.p90) == (5.0, 9.0)
    assert distribution.p99 == pytest.approx(9.9)


def test_empty_run_has_zero_counts():
    summary = summarize([], slo=INFINITE)
    assert (summary.sent, summary.duration_s) == (0, 0.0)
    assert summary.request_throughput is None
    assert summary.ttft_s is summary.itl_s is summary.goodput is summary.slo_attainment is None


def test_failures_are_counted_by_reason_and_miss_the_slo():
    """SLO attainment counts failed requests as missing the SLO, and ignores aborted requests."""
    run = [
        ended("a", 0.0, [1.0]),
        ended("b", 0.0, [1.0], FinishReason.ERROR),
        ended("c", 0.0, [], FinishReason.ERROR),
        ended("d", 0.0, [1.0], FinishReason.ABORT),
    ]
    summary = summarize(run, slo=INFINITE, errors={"b": "timeout"})
    assert (summary.completed, summary.failed, summary.unfinished) == (1, 2, 1)
    assert summary.errors == {"timeout": 1, "error": 1}
    assert summary.slo_attainment == pytest.approx(1 / 3)


def test_the_slo_holds_jointly():
    """A request meets the SLO only if it meets every bound."""
    run = [ended("a", 0.0, [0.1, 9.0]), ended("b", 0.0, [5.0, 5.1]), ended("c", 0.0, [0.1, 0.2])]
    assert summarize(run, slo=Slo(ttft_s=1.0, tpot_s=1.0)).slo_attainment == pytest.approx(1 / 3)


@given(runs())
def test_percentiles_rise(run):
    """P50 ≤ P90 ≤ P99 ≤ max for each latency."""
    summary = summarize(run)
    for latency in (summary.ttft_s, summary.itl_s, summary.tpot_s, summary.e2e_s):
        if latency is not None:
            assert latency.p50 <= latency.p90 <= latency.p99 <= latency.max


@given(run=runs(), bound=st.floats(0.001, 20))
def test_goodput_never_exceeds_throughput(run, bound):
    summary = summarize(run, slo=Slo(ttft_s=bound, tpot_s=bound))
    assert (summary.goodput or 0.0) <= (summary.request_throughput or 0.0)
    assert 0.0 <= (summary.slo_attainment or 0.0) <= 1.0


@given(runs(reasons=(FinishReason.STOP, FinishReason.LENGTH)))
def test_an_infinite_slo_is_always_met(run):
    summary = summarize(run, slo=INFINITE)
    assert summary.slo_attainment == (1.0 if run else None)
    assert summary.goodput == summary.request_throughput


@given(runs())
def test_every_request_is_counted_once(run):
    summary = summarize(run)
    assert summary.sent == len(run) == summary.completed + summary.failed + summary.unfinished
    assert sum(summary.errors.values()) == summary.failed


@given(runs())
def test_summary_round_trips_through_json(run):
    summary = summarize(run, slo=Slo(ttft_s=1.0))
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_a_run_lasts_from_the_first_arrival_to_the_last_event():
    run = [ended("a", 2.0, [4.0]), ended("b", 9.0, [], FinishReason.ERROR)]
    assert summarize(run).duration_s == 7.0
    assert summarize(run, duration_s=10.0).request_throughput == 0.1
    assert Moment.LAST_TOKEN not in run[1].moments
