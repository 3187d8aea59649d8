"""Reuse of cached prefixes: loading their KV compared with recomputing it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.registry import performance_model
from twofold.performance.reuse import (
    REST,
    PrefixCost,
    layer_wise,
    prefix_bytes_per_s,
    reuse_s,
    saved_s,
    shortest_prefix,
)

EIGHT_A800 = 8 * 312e12
KV_BYTES = 327_680
# LLaMA-70B in the paper: 80 layers of width 8,192, eight query heads per KV head, two bytes per value.
PUBLISHED = PrefixCost(kv_bytes=2 * 80 * 8192 * 2 / 8, flops=80 * 22 * 8192**2, square_flops=80 * 4 * 8192)


@pytest.fixture(scope="module")
def llama(models, machines):
    """Return a roofline model of llama2-70b."""
    # The measured profiles do not cover long prompts.
    return performance_model("roofline", models["llama2-70b"], machines["dgx-a100"], 8)


def test_reproduces_the_published_bandwidth():
    # The Mooncake paper states 6 GB/s.
    assert PUBLISHED.bytes_per_s(8192, EIGHT_A800) / 1e9 == pytest.approx(5.86, abs=0.005)
    assert PUBLISHED.kv_bytes == KV_BYTES


@given(st.integers(1, 10**6), st.floats(1e12, 1e17))
def test_matches_the_inequality_of_the_paper(prefix, flops_per_s):
    # In the notation of Mooncake's paper: B = G·2·d·s / (gqa·(a·p·d + b·d²)).
    d, s, gqa, a, b = 8192, 2, 8, 4, 22
    expected = flops_per_s * 2 * d * s / (gqa * (a * prefix * d + b * d * d))
    assert PUBLISHED.bytes_per_s(prefix, flops_per_s) == pytest.approx(expected)


def test_covers_models_of_the_catalog(models):
    llama, bloom = (PrefixCost.of(models[name]) for name in ("llama2-70b", "bloom-176b"))
    assert llama.kv_bytes == PUBLISHED.kv_bytes
    assert llama.square_flops == PUBLISHED.square_flops
    # Mooncake counts fewer FLOPs of the linear layers.
    assert llama.flops / PUBLISHED.flops == pytest.approx(1.17, abs=0.01)
    assert bloom.bytes_per_s(8192, EIGHT_A800) > 4 * llama.bytes_per_s(8192, EIGHT_A800)


def test_longer_prefixes_are_worth_slower_links(llama):
    lengths = (512, 2048, 8192, 32_768, 131_072)
    predicted = [prefix_bytes_per_s(llama, KV_BYTES, length) for length in lengths]
    counted = [PUBLISHED.bytes_per_s(length, EIGHT_A800) for length in lengths]
    assert predicted == sorted(predicted, reverse=True)
    assert counted == sorted(counted, reverse=True)
    assert 0.2 < predicted[2] / counted[2] < 1.0


@given(bandwidth=st.floats(0.5e9, 20e9), latency_s=st.floats(0, 0.01))
def test_the_shortest_prefix_is_the_break_even(llama, bandwidth, latency_s):
    tokens = shortest_prefix(llama, KV_BYTES, bandwidth, latency_s)
    assert tokens is not None  # quadratic attention makes every link worthwhile for long prefixes
    assert latency_s + tokens * KV_BYTES / bandwidth < saved_s(llama, tokens)
    if tokens > 1:
        assert latency_s + (tokens - 1) * KV_BYTES / bandwidth >= saved_s(llama, tokens - 1)


def test_bandwidth_and_prefix_break_even_together(llama):
    tokens = shortest_prefix(llama, KV_BYTES, 2e9)
    assert prefix_bytes_per_s(llama, KV_BYTES, tokens) == pytest.approx(2e9, rel=1e-3)


def test_slow_links_have_no_prefix(llama):
    assert shortest_prefix(llama, KV_BYTES, 1e4) is None


def test_the_longer_of_load_and_compute_counts(llama):
    prompt, reused = 8192, 4096
    rest_s = llama.prefill_s(prompt - reused, prompt**2 - reused**2)
    assert reuse_s(llama, prompt, reused, 0.0) == reuse_s(llama, prompt, reused, rest_s) == rest_s
    assert reuse_s(llama, prompt, reused, 2 * rest_s) == 2 * rest_s
    whole = llama.prefill_s(reused + REST, (reused + REST) ** 2)
    assert saved_s(llama, reused) + reuse_s(llama, reused + REST, reused, 0.0) == pytest.approx(whole)


def test_no_bandwidth_suffices_without_savings(models, machines):

    class Flat:
        def prefill_s(self, tokens, squares):
            return 0.05

    assert prefix_bytes_per_s(Flat(), KV_BYTES, 8) == math.inf
    assert shortest_prefix(Flat(), KV_BYTES, 1e12) is None


@pytest.mark.parametrize(
    "impossible",
    [
        lambda _: PUBLISHED.bytes_per_s(0, EIGHT_A800),
        lambda llama: prefix_bytes_per_s(llama, KV_BYTES, 0),
        lambda llama: shortest_prefix(llama, KV_BYTES, 0.0),
    ],
)
def test_rejects_empty_prefixes_and_zero_bandwidth(llama, impossible):
    with pytest.raises(ConfigurationError):
        impossible(llama)


LANE = st.floats(0.001, 100.0)


def by_layers(layers, load, compute, store):
    """Simulate a layer-wise prefill (Mooncake, section 5.2); return the times at which computing and storing end."""
    loaded, computed, stored = load, 0.0, 0.0
    for _ in range(layers):
        begun = max(loaded, computed)  # attention waits until its layer is loaded
        loaded = begun + load  # then the load of the next layer starts
        computed = begun + compute
        stored = max(stored, computed) + store
    return computed, stored


@given(st.integers(1, 130), LANE, LANE, LANE)
def test_layer_wise_matches_the_simulated_protocol(layers, load, compute, store):
    computed, stored = by_layers(layers, load / layers, compute / layers, store / layers)
    assert layer_wise(layers, load, compute) == pytest.approx(computed)
    assert layer_wise(layers, load, compute, store) == pytest.approx(stored)


@given(st.integers(10, 130), LANE, LANE)
def test_layer_wise_exceeds_the_longest_lane_by_at_most_a_layer_of_the_others(layers, load, compute):
    longer = max(load, compute)
    assert longer <= layer_wise(layers, load, compute) * (1 + 1e-12)
    assert layer_wise(layers, load, compute) <= 1.1 * longer


def test_a_single_lane_takes_its_own_time():
    assert layer_wise(80, 3.0) == pytest.approx(3.0)
