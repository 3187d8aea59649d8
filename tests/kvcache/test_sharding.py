"""Sharding of KV caches over tensor and pipeline ranks, and hand-offs between different shardings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.kvcache.sharding import (
    UNSHARDED,
    LayerTraffic,
    ReshardPiece,
    Sharding,
    check_sharding,
    layer_traffic,
    plan_reshard,
)


@given(
    tensor=st.integers(1, 8), pipeline=st.integers(1, 8), per_rank=st.integers(1, 4), extra_layers=st.integers(0, 20)
)
def test_assigns_every_head_of_every_layer_to_one_rank(tensor, pipeline, per_rank, extra_layers):
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


def test_gives_remaining_layers_to_the_first_stages():
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
def test_rejects_models_that_do_not_divide(split, kv_heads, heads, why):
    with pytest.raises(ConfigurationError, match=why):
        check_sharding(split, kv_heads, heads, "m")
    check_sharding(UNSHARDED, kv_heads, heads, "m")


SPLITS = st.builds(Sharding, st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5))


@given(source=SPLITS, target=SPLITS, heads=st.lists(st.sampled_from([12, 24]), min_size=5, max_size=12))
def test_a_reshard_moves_every_head_of_every_layer_once(source, target, heads):
    pieces = plan_reshard(source, target, heads)
    layers = len(heads)
    got = {rank: [] for rank in range(target.ranks)}
    for piece in pieces:
        assert set(piece.layers) <= set(source.layers(piece.source, layers))
        for layer in piece.layers:
            assert set(piece.heads) <= set(source.heads(piece.source, heads[layer]))
            got[piece.target] += [(layer, head) for head in piece.heads]
    for rank, held in got.items():
        wanted = [(layer, head) for layer in target.layers(rank, layers) for head in target.heads(rank, heads[layer])]
        assert sorted(held) == wanted


@given(source=SPLITS, target=SPLITS, heads=st.lists(st.sampled_from([12, 24]), min_size=5, max_size=12))
def test_the_reverse_plan_has_the_same_pieces(source, target, heads):
    there = {(p.source, p.target, p.layers, p.heads) for p in plan_reshard(source, target, heads)}
    back = {(p.target, p.source, p.layers, p.heads) for p in plan_reshard(target, source, heads)}
    assert there == back


@given(source=SPLITS, target=SPLITS, heads=st.lists(st.sampled_from([12, 24]), min_size=5, max_size=12))
def test_the_busiest_rank_sends_its_shard(source, target, heads):
    for count, layer in zip(heads, layer_traffic(plan_reshard(source, target, heads), len(heads)), strict=True):
        assert layer.heads == count // source.tensor
        assert 1 <= layer.pieces <= target.tensor


def test_plans_between_one_and_two_ranks():
    assert plan_reshard(UNSHARDED, Sharding(2, 1), [4, 4]) == [
        ReshardPiece(0, 0, range(2), range(2)),
        ReshardPiece(0, 1, range(2), range(2, 4)),
    ]
    assert plan_reshard(Sharding(1, 2), UNSHARDED, [4, 4, 4]) == [
        ReshardPiece(0, 0, range(2), range(4)),
        ReshardPiece(1, 0, range(2, 3), range(4)),
    ]
    assert layer_traffic(plan_reshard(UNSHARDED, Sharding(2, 1), [4, 4]), 2) == [LayerTraffic(4, 2)] * 2
    assert layer_traffic(plan_reshard(Sharding(2, 1), UNSHARDED, [4, 4]), 2) == [LayerTraffic(2, 1)] * 2
