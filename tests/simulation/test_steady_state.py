"""Rates in steady state: without the filling and the drain of the cluster."""

import pytest

from twofold.cluster.file import parse_cluster
from twofold.hardware.catalog import load_catalog
from twofold.reporting.simulation.facts import facts
from twofold.simulation.simulate import simulate
from twofold.simulation.statistics import RunStatistics
from twofold.slo import Slo
from twofold.workload.source import workload

CATALOG = load_catalog()


def run(rate, count):
    spec = parse_cluster("1xh100@4:mixed", model="llama-3.1-70b", catalog=CATALOG)
    requests = workload("512+200", rate=rate, num_requests=count, arrival="constant")
    return simulate(spec, requests, catalog=CATALOG, slo=Slo(ttft_s=2.0), series=False)


def test_the_rate_is_that_of_the_arrivals_if_the_cluster_keeps_up():
    result = run(rate=2.0, count=120)
    assert result.steady.requests_per_s == pytest.approx(2.0, rel=0.05)
    assert result.steady.output_tokens_per_s == pytest.approx(400.0, rel=0.05)
    assert result.steady.goodput_per_s == result.steady.requests_per_s
    assert result.completed / result.duration_s < 1.95


def test_the_rate_is_the_capacity_if_the_cluster_is_overloaded():
    slow, fast = run(rate=30.0, count=3000), run(rate=60.0, count=6000)
    assert slow.steady.requests_per_s < 25.0
    assert fast.steady.requests_per_s == pytest.approx(slow.steady.requests_per_s, rel=0.2)
    assert slow.steady.goodput_per_s < slow.steady.requests_per_s


def test_a_run_without_completed_requests_in_time_has_no_steady_state():
    assert run(rate=1.0, count=1).steady is None


def test_requests_beyond_the_context_of_the_model_are_noticed():
    spec = parse_cluster("1xh100:mixed", model="llama2-70b", catalog=CATALOG)
    result = simulate(spec, workload("6000+100", rate=1.0, num_requests=3), catalog=CATALOG, series=False)
    assert (result.longest_request, result.max_context) == (6100, 4096)
    known = {fact.label: fact.value for fact in facts(result)}
    assert known["Longest request"] == "6,100 tokens, beyond the context of llama2-70b (4,096)"


@pytest.mark.parametrize(
    ("lengths", "rate", "seen"),
    [
        ("9000+2", 0.2, ["prompts of up to 9,000 tokens; measured up to 8,192 on dgx-h100"]),
        ("64+300", 400.0, ["batches of {:.0f} in the mean; measured up to 64 on dgx-h100"]),
        ("512+20", 1.0, []),
    ],
)
def test_sizes_beyond_the_measured_ones_are_noticed(lengths, rate, seen):
    spec = parse_cluster("1xh100:mixed", model="bloom-176b", catalog=CATALOG)
    result = simulate(spec, workload(lengths, rate=rate, num_requests=200), catalog=CATALOG, series=False)
    found = [fact.value for fact in facts(result) if fact.label == "Extrapolated"]
    assert found == [text.format(result.pools[0].mean_batch) for text in seen]


def test_counts_of_long_runs_are_thinned():
    statistics = RunStatistics(None, None, over_all_tokens=False)
    for number in range(100_000):
        statistics.completed = number // 2
        statistics.arrive(10 * number)
    duration, completed, _, _ = statistics.steady()
    assert duration == pytest.approx(500_000, rel=0.01)
    assert completed == pytest.approx(duration / 20, rel=0.001)
    assert len(statistics._counts) <= 256
