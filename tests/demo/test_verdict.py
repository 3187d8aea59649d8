"""The demo's SLO, and its comparison of split and colocated serving."""

import pytest
from demo.objectives import objectives, probe_requests, verdict

from twofold.reporting.summary import summarize
from twofold.request import FinishReason, Request
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def run(ttft_s, gap_s, count=20):
    """Return the summary of `count` equal requests with the given TTFT and token gap."""
    timelines = []
    for i in range(count):
        request = Request(id=str(i), arrival_s=0.0, prompt_tokens=100, output_tokens=3)
        times = [ttft_s, ttft_s + gap_s, ttft_s + 2 * gap_s]
        moments = {Moment.ARRIVED: 0.0, Moment.FIRST_TOKEN: times[0], Moment.LAST_TOKEN: times[-1]}
        timelines.append(Timeline(request, moments, times, 3, FinishReason.LENGTH))
    return summarize(timelines, slo=SLO)


@pytest.mark.parametrize(
    ("split", "colocated", "expected"),
    [
        (run(0.5, 0.05), run(0.5, 0.2), "split meets the SLO better than colocated (100% against 0%)"),
        (run(2.0, 0.05), run(0.5, 0.05), "colocated meets the SLO better than split (100% against 0%)"),
        (run(0.5, 0.05), run(0.6, 0.05), "meet the SLO equally well (100% and 100%)"),
    ],
)
def test_names_the_better_design_or_neither(split, colocated, expected):
    assert expected in verdict(("split", split), ("colocated", colocated))


def test_reports_p99_ratios_of_gaps_and_ttft():
    said = verdict(("split", run(0.5, 0.05)), ("colocated", run(0.25, 0.1)))
    assert "0.50× the P99 gap between tokens" in said
    assert "2.00× the P99 time to the first token" in said


def test_gives_no_verdict_without_completed_requests():
    assert "No verdict" in verdict(("split", run(1, 1, count=0)), ("colocated", run(1, 1)))


def test_derives_load_and_slo_from_unloaded_latencies():
    sample = [Request(id=str(i), arrival_s=0.0, prompt_tokens=100 + i, output_tokens=40) for i in range(9)]
    assert {r.prompt_tokens for r in probe_requests(sample)} == {104}

    def goal(speed):
        alone = [
            Timeline(
                request,
                {Moment.ARRIVED: 0.0, Moment.FIRST_TOKEN: speed, Moment.LAST_TOKEN: 2 * speed},
                [speed, 2 * speed],
                output_tokens=2,
            )
            for request in probe_requests(sample)
        ]
        return objectives(alone)

    fast, slow = goal(0.1), goal(0.2)
    assert fast.rate == pytest.approx(2 * slow.rate)
    assert slow.slo.ttft_s == pytest.approx(2 * fast.slo.ttft_s)
    assert slow.slo.tpot_s == pytest.approx(2 * fast.slo.tpot_s)
