"""What a block saves is what the prefill is shorter with it."""

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
def test_savings_add_up(llama, prompt, blocks):
    """To the whole prefill less that of what is left, where loading takes no time."""
    blocks = min(blocks, -(-prompt // 512))
    gains = savings_s(llama, prompt, [0.0] * blocks)
    reused = min(512 * blocks, prompt - 1)
    assert sum(gains) == pytest.approx(whole_s(llama, prompt) - reuse_s(llama, prompt, reused, 0.0))


@given(prompt=st.integers(513, 100_000), loads=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_nothing_is_lost_by_what_is_slow_to_load(llama, prompt, loads):
    """It is computed instead: no block saves less than nothing, and all together no more than there is."""
    gains = savings_s(llama, prompt, loads[: -(-prompt // 512)])
    assert all(gain >= 0 for gain in gains)
    assert sum(gains) <= whole_s(llama, prompt)


def test_loading_hides_behind_computing(llama):
    """A prompt of which half is loaded in less time than the rest takes saves as much as if it took none."""
    free, hidden = savings_s(llama, 8192, [0.0] * 8), savings_s(llama, 8192, [0.01] * 8)
    assert sum(free) == pytest.approx(sum(hidden))
    slow = savings_s(llama, 8192, [10.0] * 8)
    assert sum(slow) == 0.0


def test_the_last_token_is_computed(llama):
    """A prompt that is wholly there still makes its first output token."""
    (gain,) = savings_s(llama, 512, [0.0])
    assert 0 < gain < whole_s(llama, 512)


def test_no_blocks_save_nothing(llama):
    """A prompt that nobody has seen."""
    assert savings_s(llama, 8192, []) == []
