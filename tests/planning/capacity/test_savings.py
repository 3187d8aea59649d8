"""Prefill time saved by cached blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.hardware.catalog import load_catalog
from twofold.performance.registry import performance_model
from twofold.performance.reuse import reuse_s
from twofold.planning.capacity.curve import savings_s


@pytest.fixture(scope="module")
def llama():
    catalog = load_catalog()
    return performance_model("auto", catalog.model("llama2-70b"), catalog.machine("a100"), 8)


def whole_s(model, prompt):
    return model.prefill_s(prompt, prompt * prompt)


@given(prompt=st.integers(2, 100_000), blocks=st.integers(1, 50))
def test_savings_add_up_to_the_skipped_prefill(llama, prompt, blocks):
    blocks = min(blocks, -(-prompt // 512))
    gains = savings_s(llama, prompt, [0.0] * blocks)
    reused = min(512 * blocks, prompt - 1)
    assert sum(gains) == pytest.approx(whole_s(llama, prompt) - reuse_s(llama, prompt, reused, 0.0))


@given(prompt=st.integers(513, 100_000), loads=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_slow_blocks_are_computed_and_save_nothing(llama, prompt, loads):
    gains = savings_s(llama, prompt, loads[: -(-prompt // 512)])
    assert all(gain >= 0 for gain in gains)
    assert sum(gains) <= whole_s(llama, prompt)


def test_loading_overlaps_with_prefill(llama):
    free, hidden = savings_s(llama, 8192, [0.0] * 8), savings_s(llama, 8192, [0.01] * 8)
    assert sum(free) == pytest.approx(sum(hidden))
    slow = savings_s(llama, 8192, [10.0] * 8)
    assert sum(slow) == 0.0


def test_the_last_prompt_token_is_always_computed(llama):
    (gain,) = savings_s(llama, 512, [0.0])
    assert 0 < gain < whole_s(llama, 512)


def test_no_blocks_save_nothing(llama):
    assert savings_s(llama, 8192, []) == []
