"""Loads, computation and stores side by side: the closed form against the protocol, layer by layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.performance.reuse import layer_wise

LANE = st.floats(0.001, 100.0)


def by_layers(layers, load, compute, store):
    """What Mooncake section 5.2 says, a layer at a time."""
    loaded, computed, stored = load, 0.0, 0.0
    for _ in range(layers):
        begun = max(loaded, computed)  # before its attention the load of this layer is waited for …
        loaded = begun + load  # … and that of the next one begins
        computed = begun + compute
        stored = max(stored, computed) + store
    return computed, stored


@given(st.integers(1, 130), LANE, LANE, LANE)
def test_it_is_what_the_protocol_takes(layers, load, compute, store):
    """Until the last layer is computed, and until it is stored."""
    computed, stored = by_layers(layers, load / layers, compute / layers, store / layers)
    assert layer_wise(layers, load, compute) == pytest.approx(computed)
    assert layer_wise(layers, load, compute, store) == pytest.approx(stored)


@given(st.integers(10, 130), LANE, LANE)
def test_it_is_about_the_longer_of_the_two(layers, load, compute):
    """Never less, and never longer by more than a layer of the other."""
    longer = max(load, compute)
    assert longer <= layer_wise(layers, load, compute) * (1 + 1e-12)
    assert layer_wise(layers, load, compute) <= 1.1 * longer


def test_a_lane_alone_takes_its_time():
    """Nothing is loaded, nothing waits."""
    assert layer_wise(80, 3.0) == pytest.approx(3.0)
