"""Paged attention gives the same result as dense attention over whole sequences."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.engine.base import KvLayout, LayerShape, SequenceStep
from twofold.engine.torch import batch as planner
from twofold.engine.torch.batch import LayerHooks, PackedBatch, paged_attention
from twofold.engine.torch.kernels import DecodeGroup, Scratch
from twofold.engine.torch.pool import KvPool, LayerNotifier

HEADS, SHAPE = 6, LayerShape(kv_heads=2, key_dim=8, value_dim=5)
SCALING = 0.4


class Layer(torch.nn.Module):
    """Stub of an attention module of transformers. Only its `layer_idx` is read."""

    layer_idx = 0


def dense(query, key, value, start, window, softcap, sinks):
    """Return dense attention, the reference for paged attention."""
    repeats = HEADS // SHAPE.kv_heads
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("nhd,chd->hnc", query, key) * SCALING
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    rows = torch.arange(start, start + len(query))[:, None]
    columns = torch.arange(len(key))
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], -1)
    weights = torch.softmax(scores, -1)[..., : len(key)]
    return torch.einsum("hnc,chv->nhv", weights, value)


@settings(max_examples=120)
@given(
    parts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=7),
    one_token=st.booleans(),
    block_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(2.0),
    with_sinks=st.booleans(),
    scattered=st.booleans(),
    group_bytes=st.sampled_from([1, 4000, 2**30]),
    seed=st.integers(0, 1000),
)
def test_equals_dense_attention(
    parts, one_token, block_size, window, softcap, with_sinks, scattered, group_bytes, seed
):
    """Paged attention equals dense attention for any batch and block table, even if unused memory contains garbage."""
    generator = torch.Generator().manual_seed(seed)
    spans = [(start, 1 if one_token else count) for start, count in parts]
    needed = [-(-(start + count) // block_size) for start, count in spans]
    pool = KvPool(KvLayout((SHAPE,), block_size, "float32", 4), sum(needed))
    pool.keys(0).fill_(float("nan"))
    pool.values(0).fill_(float("inf"))
    order = torch.randperm(sum(needed), generator=generator) if scattered else torch.arange(sum(needed))
    tables = [table.tolist() for table in order.split(needed)]
    sequences = []
    for (start, count), table in zip(spans, tables, strict=True):
        states = [
            torch.randn(start + count, heads, dim, generator=generator)
            for heads, dim in ((HEADS, 8), (SHAPE.kv_heads, 8), (SHAPE.kv_heads, 5))
        ]
        for position in range(start):
            block, offset = table[position // block_size], position % block_size
            pool.keys(0)[block, offset], pool.values(0)[block, offset] = (states[1][position], states[2][position])
        sequences.append(states)
    steps = [
        SequenceStep(str(i), [0] * count, start, table, None)
        for i, ((start, count), table) in enumerate(zip(spans, tables, strict=True))
    ]
    sinks = torch.randn(HEADS, generator=generator) if with_sinks else None

    batch = PackedBatch(steps, pool, [window], Scratch(), LayerHooks(LayerNotifier(pool.device)))
    packed = [
        torch.cat([sequences[i][part][spans[i][0] :] for i in batch.order]).transpose(0, 1).unsqueeze(0)
        for part in range(3)
    ]
    before, planner._CPU_GROUP_BYTES = planner._CPU_GROUP_BYTES, group_bytes
    try:
        got, _ = paged_attention(
            Layer(), *packed, None, twofold_batch=batch, scaling=SCALING, softcap=softcap, s_aux=sinks
        )
    finally:
        planner._CPU_GROUP_BYTES = before

    expected = [
        dense(sequences[i][0][spans[i][0] :], *sequences[i][1:], spans[i][0], window, softcap, sinks)
        for i in batch.order
    ]
    assert torch.allclose(got[0], torch.cat(expected), atol=2e-5)


def groups_of(contexts, window=None, block_size=16, group_bytes=2**30, monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr(planner, "_CPU_GROUP_BYTES", group_bytes)
    pool = KvPool(KvLayout((SHAPE,), block_size, "float32", 4), 1)
    steps = [SequenceStep(str(c), [0], c, [0] * (c // block_size + 1), None) for c in contexts]
    parts = planner.AttentionPlanner(window, pool, Scratch()).plan(steps)
    assert all(isinstance(part, DecodeGroup) for part in parts)
    assert [part.rows.start for part in parts] == [0, *(part.rows.stop for part in parts)][:-1]
    return [part.rows.stop - part.rows.start for part in parts]


def test_groups_sequences_of_similar_length():
    """Only sequences of similar length are padded to one length."""
    assert groups_of([500, 490, 480, 470]) == [4]
    assert groups_of([4000, 500, 490, 30, 20]) == [1, 2, 2]


def test_a_window_limits_the_context_read():
    assert groups_of([4000, 500, 490, 300, 200], window=128) == [5]


def test_groups_fit_the_cache(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    bytes_of_two = 2 * 8 * 16 * 2 * (8 + 5) * 4
    assert groups_of([120] * 5, group_bytes=bytes_of_two, monkeypatch=monkeypatch) == [2, 2, 1]
    assert groups_of([120] * 3, group_bytes=1, monkeypatch=monkeypatch) == [1, 1, 1]
