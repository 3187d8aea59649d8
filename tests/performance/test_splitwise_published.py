"""SplitwiseSim's performance model, which interpolates the published profile."""

import csv
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.splitwise_published import PiecewiseLinear, splitwise_published

XS = [128, 256, 512, 4096]
YS = [0.08, 0.1, 0.17, 1.3]


@given(st.floats(128, 4096))
def test_interpolates_linearly(x):
    assert PiecewiseLinear(XS, YS).at(x) == pytest.approx(float(np.interp(x, XS, YS)), rel=1e-12)


@given(st.floats(0, 128), st.floats(4096, 1e6))
def test_extrapolates_the_outer_segments(low, high):
    curve = PiecewiseLinear(XS, YS)
    assert curve.at(low) == pytest.approx(0.08 + (0.1 - 0.08) / 128 * (low - 128), rel=1e-12)
    assert curve.at(high) == pytest.approx(1.3 + (1.3 - 0.17) / (4096 - 512) * (high - 4096), rel=1e-12)


@pytest.mark.parametrize(("xs", "ys"), [([1], [1]), ([1, 2], [1]), ([2, 1], [1, 2]), ([1, 1], [1, 2])])
def test_rejects_invalid_points(xs, ys):
    with pytest.raises(ConfigurationError):
        PiecewiseLinear(xs, ys)


@pytest.fixture(scope="module")
def on_h100(models, machines):
    return splitwise_published(models["bloom-176b"], machines["dgx-h100"], 8)


@pytest.fixture(scope="module")
def on_a100(models, machines):
    return splitwise_published(models["bloom-176b"], machines["dgx-a100"], 8)


@pytest.fixture(scope="module")
def reference(profile_path):
    """Median prefill and decode times (s) of bloom-176b on H100, by the number of prompt tokens in the batch."""
    groups = defaultdict(list)
    with profile_path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], row["tensor_parallel"]) == ("bloom-176b", "h100-80gb", "8"):
                times = float(row["prompt_time"]) / 1000, float(row["token_time"]) / 1000
                groups[int(row["prompt_size"]) * int(row["batch_size"])].append(times)
    xs = np.array(sorted(groups), dtype=float)
    return xs, *(np.array([np.median(np.array(groups[int(x)])[:, i]) for x in xs]) for i in (0, 1))


def line(xs, ys, x):
    """Return the linear interpolation or extrapolation of a curve at x."""
    i = int(np.clip(np.searchsorted(xs, x) - 1, 0, len(xs) - 2))
    return ys[i] + (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) * (x - xs[i])


@given(st.integers(1, 100_000), st.integers(1, 512))
def test_equals_interpolation_of_the_raw_medians(on_h100, reference, tokens, sequences):
    xs, prompt, token = reference
    assert on_h100.prefill_s(tokens, 0) == pytest.approx(line(xs, prompt, tokens), rel=1e-12)
    assert on_h100.decode_cost(sequences).base_s == pytest.approx(line(xs, token, sequences), rel=1e-12)
    mixed = 1.1 * line(xs, prompt, tokens + sequences)
    assert on_h100.mixed_s(tokens, 0, sequences, 12345) == pytest.approx(mixed, rel=1e-12)
    ttft_s, tpot_s = on_h100.uncontended(tokens, 7)
    assert (ttft_s, tpot_s) == pytest.approx((line(xs, prompt, tokens), line(xs, token, tokens)), rel=1e-12)


def test_decode_batching_is_almost_free(on_h100, on_a100):
    """As in SplitwiseSim, a decode batch of 64 takes 35.5 ms on H100 and 47.6 ms on A100 at any context length."""
    assert on_h100.decode_cost(64).base_s * 1e3 == pytest.approx(35.5, abs=0.1)
    assert on_a100.decode_cost(64).base_s * 1e3 == pytest.approx(47.6, abs=0.1)
    assert on_h100.decode_cost(64).context_s == 0.0


def test_the_capped_h100_is_slower_in_prefill_only(models, machines, on_h100):
    capped = splitwise_published(models["bloom-176b"], machines["dgx-h100-capped"], 8)
    assert capped.prefill_s(1500, 0) / on_h100.prefill_s(1500, 0) == pytest.approx(1.3, rel=1e-9)
    assert capped.decode_cost(8) == on_h100.decode_cost(8)


def test_rejects_negative_extrapolations(models, machines):
    model = splitwise_published(models["llama2-70b"], machines["dgx-a100"], 2)
    assert model.prefill_s(30_000, 0) > 0
    with pytest.raises(ConfigurationError, match="40,000 batched tokens"):
        model.prefill_s(40_000, 0)


def test_rejects_unpublished_pairs(models, machines):
    with pytest.raises(ConfigurationError, match=r"bloom-176b on a100-80gb TP4, only of .*`auto`"):
        splitwise_published(models["bloom-176b"], machines["dgx-a100"], 4)
