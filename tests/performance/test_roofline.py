"""The roofline model, which predicts iteration times of any model on any machine."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.hardware.specs import Model
from twofold.performance.coefficients import packaged
from twofold.performance.distserve_published import distserve_published
from twofold.performance.fitted import fitted
from twofold.performance.roofline import RooflineTerms, roofline


@pytest.fixture(scope="module")
def mixture():
    """Return a mixture-of-experts model with latent attention and a tenth of its weights active."""
    return Model(
        name="moe",
        layers=60,
        hidden_size=7168,
        heads=128,
        kv_heads=128,
        head_dim=128,
        parameters=400e9,
        active_parameters=40e9,
        weight_bytes=400_000_000_000,
        kv_latent_dims=576,
        source="made",
        date="2025",
    )


def test_is_within_20_percent_of_the_fitted_pairs(models, machines):
    named = {"a100-80gb": "dgx-a100", "h100-80gb": "dgx-h100"}
    for entry in packaged():
        if entry.accelerator not in named:
            continue
        pair = models[entry.model], machines[named[entry.accelerator]], entry.tensor_parallel
        estimate, known = roofline(*pair), fitted(*pair)
        prefill = [
            abs(estimate.prefill_s(n, n * n) / known.prefill_s(n, n * n) - 1) for n in (128, 512, 1500, 2048, 8192)
        ]
        decode = [abs(estimate.decode_cost(b).base_s / known.decode_cost(b).base_s - 1) for b in (1, 8, 32)]
        assert sum(prefill) / len(prefill) < 0.2
        assert sum(decode) / len(decode) < 0.2


def test_is_near_distserve_s_latency_model(models, machines):
    prefill, decode = [], []
    for name, parallel in (("13b", 1), ("13b", 2), ("13b", 4), ("66b", 2), ("66b", 3), ("66b", 4), ("66b", 8)):
        pair = models[f"opt-{name}"], machines["dgx-a100"], parallel
        estimate, known = roofline(*pair), distserve_published(*pair)
        prefill += [abs(estimate.prefill_s(n, n * n) / known.prefill_s(n, n * n) - 1) for n in (128, 512, 1024, 2048)]
        for batch in (1, 16, 64, 128):
            mine, theirs = estimate.decode_cost(batch), known.decode_cost(batch)
            context = 600 * batch
            ratio = (mine.base_s + mine.context_s * context) / (theirs.base_s + theirs.context_s * context)
            decode.append(abs(ratio - 1))
    assert sum(prefill) / len(prefill) < 0.1
    assert sum(decode) / len(decode) < 0.25


def test_errors_are_leave_one_out_errors(models, machines):
    measured = roofline(models["bloom-176b"], machines["dgx-h100"], 8).error
    other = roofline(models["tiny-1b"], machines["dgx-h100"], 1).error
    assert measured.estimated
    assert other.estimated
    assert "8 measured pairs" in other.basis
    assert 0 < measured.prefill < 0.2
    assert 0 < other.decode < 0.2


@given(
    st.integers(1, 20_000),
    st.integers(1, 4000),
    st.integers(0, 300),
    st.integers(0, 10**7),
    st.sampled_from([1, 2, 4, 8]),
)
def test_times_grow_with_work(models, machines, mixture, tokens, more, sequences, context, parallel):
    for model in (models["tiny-1b"], models["llama2-70b"], mixture):
        estimate = roofline(model, machines["dgx-h100"], parallel)
        prefill_s = estimate.prefill_s(tokens, tokens**2)
        assert estimate.prefill_s(tokens + more, (tokens + more) ** 2) > prefill_s > 0
        cost = estimate.decode_cost(sequences)
        assert estimate.decode_cost(sequences + 1).base_s > cost.base_s
        mixed_s = estimate.mixed_s(tokens, tokens**2, sequences, context)
        assert mixed_s >= max(prefill_s, cost.base_s + cost.context_s * context) * (1 - 1e-12)


def test_a_faster_machine_is_faster(models, machines):
    slow, fast = (roofline(models["llama2-70b"], machines[name], 4) for name in ("dgx-a100", "dgx-h100"))
    assert fast.prefill_s(1000, 10**6) < slow.prefill_s(1000, 10**6)
    assert fast.decode_cost(8).base_s < slow.decode_cost(8).base_s


def test_a_power_cap_slows_prefill_only(models, machines):
    """A power cap of half the TDP makes prefill take 1.3 times as long."""
    free, capped = (roofline(models["llama2-70b"], machines[name], 4) for name in ("dgx-h100", "dgx-h100-capped"))
    assert capped.prefill_s(1000, 10**6) == pytest.approx(1.3 * free.prefill_s(1000, 10**6))
    assert capped.decode_cost(8) == free.decode_cost(8)


def test_times_respect_peak_flops_and_bandwidth(models, machines, mixture):
    for model in (*models.values(), mixture):
        estimate, needs = (roofline(model, machines["dgx-h100"], 8), RooflineTerms.of(model, machines["dgx-h100"], 8))
        assert estimate.prefill_s(8192, 8192**2) > needs.compute_s * 8192
        assert estimate.decode_cost(1).base_s > needs.weights_s * needs.active
        assert estimate.decode_cost(1).context_s > needs.kv_s


def test_more_tokens_touch_more_experts(machines, mixture):
    estimate = roofline(mixture, machines["dgx-h100"], 8)
    dense = roofline(msgspec.structs.replace(mixture, active_parameters=400e9), machines["dgx-h100"], 8)
    full_s = dense.decode_cost(0).base_s - estimate.decode_cost(0).base_s  # zero tokens touch no expert
    assert estimate._touched_s(1) == pytest.approx(0.1 * full_s)
    assert estimate._touched_s(10) == pytest.approx((1 - 0.9**10) * full_s)


def test_one_accelerator_needs_no_all_reduce(models, machines):
    needs = RooflineTerms.of(models["tiny-1b"], machines["dgx-h100"], 1)
    assert (needs.all_reduce_s, needs.steps) == (0.0, 0.0)


def test_rejects_too_many_accelerators(models, machines):
    with pytest.raises(ConfigurationError, match="not 9"):
        roofline(models["tiny-1b"], machines["dgx-h100"], 9)
