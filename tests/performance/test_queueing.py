"""DistServe's queueing formulas, and the prompt length that saturates an accelerator."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.performance.queueing import (
    SHARE,
    crossing_rate,
    mean_ttft_s,
    quickest_by_rate,
    saturating_tokens,
    stage_times,
)
from twofold.performance.registry import performance_model

D = 0.072149

prefills = st.floats(1e-3, 10)
speedups = st.floats(1.01, 1.99)


def pipeline_s(rate, prefill_s, stages=2):
    return mean_ttft_s(rate, prefill_s, prefill_s / stages)


def tensor_s(rate, prefill_s, speedup):
    return mean_ttft_s(rate, prefill_s / speedup, prefill_s / speedup)


def one_instance_s(rate, prefill_s):
    return mean_ttft_s(rate, prefill_s, prefill_s)


def crossover_rate(prefill_s, speedup, stages=2):
    """Return the rate above which two pipeline stages have a lower mean TTFT than tensor parallelism."""
    return crossing_rate((prefill_s / speedup,) * 2, (prefill_s, prefill_s / stages))


@pytest.mark.parametrize(("rate", "expected_ms"), [(2, 78.23), (5, 92.51), (8, 121.40), (10, 165.60)])
def test_one_instance_is_equation_1(rate, expected_ms):
    assert one_instance_s(rate, D) * 1e3 == pytest.approx(expected_ms, abs=0.005)


@given(st.floats(0, 1.9), prefills)
def test_two_stages_are_equation_2(load, prefill_s):
    """At rate R and prefill time D, mean TTFT is D + R·D² / (4·(2 − R·D)) (DistServe, equation 2)."""
    rate = load / prefill_s
    expected = prefill_s + rate * prefill_s**2 / (4 * (2 - rate * prefill_s))
    assert pipeline_s(rate, prefill_s) == pytest.approx(expected)


@given(st.floats(0, 0.99), prefills, speedups)
def test_tensor_parallelism_is_equation_3(load, prefill_s, speedup):
    """At rate R, prefill time D and speed-up K, mean TTFT is D/K + R·D² / (2·K·(K − R·D)) (DistServe, equation 3)."""
    rate = load * speedup / prefill_s
    expected = prefill_s / speedup + rate * prefill_s**2 / (2 * speedup * (speedup - rate * prefill_s))
    assert tensor_s(rate, prefill_s, speedup) == pytest.approx(expected)


def test_ttft_without_load_is_the_latency():
    assert pipeline_s(0, D, 4) == D
    assert tensor_s(0, D, 1.5) == D / 1.5
    assert pipeline_s(7, D, 1) == tensor_s(7, D, 1) == one_instance_s(7, D)


def test_ttft_is_infinite_beyond_the_stable_rate():
    assert one_instance_s(1 / D, D) == math.inf
    assert pipeline_s(1 / D, D) < math.inf
    assert pipeline_s(2 / D, D) == math.inf


def test_low_rates_favour_tensor_and_high_rates_pipeline_parallelism():
    crossover = crossover_rate(D, 1.5)
    assert crossover == pytest.approx(12.974, abs=5e-4)
    assert tensor_s(2, D, 1.5) < pipeline_s(2, D)
    assert tensor_s(crossover, D, 1.5) == pytest.approx(pipeline_s(crossover, D))
    assert tensor_s(15, D, 1.5) > pipeline_s(15, D)


@given(prefills, st.integers(2, 16), st.floats(0.01, 0.99))
def test_tensor_parallelism_is_better_below_every_crossover(prefill_s, stages, share):
    speedup = 1 + share * (stages - 1)
    rate = crossover_rate(prefill_s, speedup, stages)
    assert 0 < rate * prefill_s < speedup
    below, above = 0.9 * rate, min(1.1 * rate, (rate + speedup / prefill_s) / 2)
    assert tensor_s(below, prefill_s, speedup) < pipeline_s(below, prefill_s, stages)
    assert tensor_s(above, prefill_s, speedup) > pipeline_s(above, prefill_s, stages)


def test_extreme_speed_ups_have_no_crossover():
    assert crossover_rate(D, 2.0) is None
    assert crossover_rate(D, 2.5, 2) is None
    assert crossover_rate(D, 1.0) == 0.0


@pytest.mark.parametrize(
    "impossible",
    [
        lambda: mean_ttft_s(-1, D, D),
        lambda: mean_ttft_s(1, D, 2 * D),
        lambda: mean_ttft_s(1, 0.0, 0.0),
        lambda: mean_ttft_s(1, math.inf, D),
        lambda: crossover_rate(-D, 1.5),
    ],
)
def test_rejects_invalid_rates_and_times(impossible):
    with pytest.raises(ConfigurationError):
        impossible()


def test_takes_stage_times_from_a_performance_model(models, machines):
    model = performance_model("distserve-published", models["opt-13b"], machines["dgx-a100"], 1, 2)
    latency_s, stage_s = stage_times(model, 512)
    assert latency_s == model.prefill_s(512, 512**2)
    assert stage_s == model.first_stage.prefill_s(512, 512**2) > model.later_stage.prefill_s(512, 512**2)


def test_finds_the_quickest_option_at_each_rate(models, machines):
    times = {
        f"TP{tensor} PP{stages}": stage_times(
            performance_model("distserve-published", models["opt-13b"], machines["dgx-a100"], tensor, stages), 512
        )
        for tensor, stages in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
    }
    found = quickest_by_rate(times)
    assert found[0] == (0.0, "TP4 PP1")
    ends = [rate for rate, _ in found[1:]] + [found[-1][0] * 1.2]
    for (start, name), end in zip(found, ends, strict=True):
        middle = (start + end) / 2
        mean = {each: mean_ttft_s(middle, *times[each]) for each in times}
        assert mean[name] == min(mean.values())


def test_a_dominant_option_is_quickest_at_every_rate():
    assert quickest_by_rate({"alone": (D, D)}) == [(0.0, "alone")]
    assert quickest_by_rate({"slow": (2 * D, D), "quick": (D, D / 2)}) == [(0.0, "quick")]


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(1.0, 5.0), st.floats(0.05, 0.95))
def test_mean_ttfts_are_equal_at_the_crossing(latency_s, share, slower, quicker):
    quick = latency_s, share * latency_s
    other = latency_s * slower * 1.001, quicker * share * latency_s
    rate = crossing_rate(quick, other)
    assert 0 < rate * quick[1] < 1
    assert mean_ttft_s(rate, *quick) == pytest.approx(mean_ttft_s(rate, *other), rel=1e-6)
    assert crossing_rate(other, quick) is None
    assert crossing_rate((other[0], quick[1]), (quick[0], other[1])) == 0.0


coefficients = st.tuples(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2), st.floats(0, 1e-6))


def quadratic(fixed, each, square):
    return lambda tokens: fixed + each * tokens + square * tokens * tokens


@given(coefficients, st.integers(1, 4000), st.floats(0.1, 1.0))
def test_finds_the_shortest_saturating_prompt(of, most, share):
    prefill_s = quadratic(*of)
    rates = [tokens / prefill_s(tokens) for tokens in range(1, most + 1)]
    enough = share * max(rates)
    found = saturating_tokens(prefill_s, most, share)
    # The best sampled length may be slightly worse than the best of all.
    assert rates[found - 1] >= enough * 0.999
    assert all(rate < enough * (1 + 1e-12) for rate in rates[: found - 1])


def test_one_token_saturates_without_a_fixed_cost():
    assert saturating_tokens(quadratic(0.0, 1e-3, 0.0), 2048) == 1


def test_matches_the_closed_form_for_linear_times():
    fixed, each, most = 0.02, 1e-4, 10_000
    best = most / (fixed + each * most)
    found = saturating_tokens(quadratic(fixed, each, 0.0), most)
    assert found == pytest.approx(SHARE * best * fixed / (1 - SHARE * best * each), abs=1)


def test_opt_13b_saturates_an_a100_at_512_tokens():
    catalog = load_catalog()
    model = performance_model("distserve-published", catalog.model("opt-13b"), catalog.machine("dgx-a100"), 1)
    found = saturating_tokens(lambda tokens: model.prefill_s(tokens, tokens * tokens), 2048)
    # Section 3.1 of the DistServe paper states 512 tokens.
    assert 400 <= found <= 700


@pytest.mark.parametrize(("most", "share"), [(0, 0.9), (10, 0.0), (10, 1.1)])
def test_rejects_invalid_lengths_and_shares(most, share):
    with pytest.raises(ValueError, match="need at least 1 token"):
        saturating_tokens(lambda _: 1.0, most, share)
