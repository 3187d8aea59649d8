"""Who holds what of a split instance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.kvcache.sharding import UNSHARDED, Sharding, check_sharding


@given(
    tensor=st.integers(1, 8),
    pipeline=st.integers(1, 8),
    per_rank=st.integers(1, 4),
    extra_layers=st.integers(0, 20),
)
def test_every_head_of_every_layer_has_one_rank(tensor, pipeline, per_rank, extra_layers):
    """Nothing is missing and nothing is held twice; no stage has two layers more than another."""
    split, layers, heads = Sharding(tensor, pipeline), pipeline + extra_layers, tensor * per_rank
    held = [
        (layer, head)
        for rank in range(split.ranks)
        for layer in split.layers(rank, layers)
        for head in split.heads(rank, heads)
    ]
    assert sorted(held) == [(layer, head) for layer in range(layers) for head in range(heads)]
    sizes = {len(split.layers(rank, layers)) for rank in range(split.ranks)}
    assert max(sizes) - min(sizes) <= 1
    check_sharding(split, [heads] * layers, heads, "m")


def test_the_first_stages_have_the_layers_that_are_left_over():
    """The last one has the vocabulary to compute."""
    split = Sharding(2, 2)
    assert [split.layers(rank, 3) for rank in range(4)] == [range(2), range(2), range(2, 3), range(2, 3)]
    assert [split.heads(rank, 4) for rank in range(4)] == [range(2), range(2, 4)] * 2


@pytest.mark.parametrize(
    ("split", "kv_heads", "heads", "why"),
    [
        (Sharding(1, 4), [2, 2, 2], 4, "m has 3 layers, too few for the 4 pipeline stages of TP1 PP4"),
        (Sharding(4, 1), [4, 2], 8, "m has 2 key-value heads, which 4 tensor ranks .* cannot share evenly"),
        (Sharding(3, 1), [3], 4, "m has 4 heads, which 3 tensor ranks"),
    ],
)
def test_what_does_not_divide_is_refused(split, kv_heads, heads, why):
    """In a sentence that says what would have to divide what."""
    with pytest.raises(ConfigurationError, match=why):
        check_sharding(split, kv_heads, heads, "m")
    check_sharding(UNSHARDED, kv_heads, heads, "m")
