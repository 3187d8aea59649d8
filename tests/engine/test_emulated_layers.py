"""Groups of layers that the emulated engine reports as computed."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from twofold.engine.emulated import LayerGroups


@given(st.integers(1, 200))
def test_groups_cover_all_layers_in_order(layers):
    ends = LayerGroups(layers).ends
    sizes = [high - low for low, high in pairwise((0, *ends))]
    assert ends[-1] == layers
    assert all(1 <= size <= 8 for size in sizes)
    assert len(sizes) <= 6 + layers / 8


@given(st.integers(1, 200))
def test_first_and_last_groups_are_single_layers(layers):
    ends = (0, *LayerGroups(layers).ends)
    # Hand-offs start early, and after the prefill only one layer remains to be transferred.
    assert ends[1] == 1
    assert ends[-1] - ends[-2] == 1


@given(st.integers(1, 200), st.integers(1, 10**7), st.integers(1, 64))
def test_layout_has_all_bytes_of_the_model(layers, kv_bytes_per_token, block_size):
    layout = LayerGroups(layers).layout(kv_bytes_per_token, block_size)
    assert layout.bytes_per_token == kv_bytes_per_token
    assert layout.bytes_per_block == kv_bytes_per_token * block_size
    assert sum(map(layout.layer_bytes_per_block, range(len(layout.layers)))) == layout.bytes_per_block


def test_layers_take_equally_long():
    groups = LayerGroups(10)
    assert [groups.ready(k, 100, 1100) for k in range(len(groups))] == [100 + 100 * end for end in groups.ends]
