"""KV pools: their layout in shared memory, and copies of blocks between pools."""

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool, copy_blocks

LAYOUT = KvLayout(
    layers=(LayerShape(2, 8, 8), LayerShape(1, 6, 4), LayerShape(3, 1, 1)), block_size=5, dtype="float32", itemsize=4
)


def filled(layout=LAYOUT, blocks=12, seed=0):
    """Return a KV pool filled with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = layout.pool_bytes(blocks)
    return KvPool(layout, blocks, torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator))


def test_layout_is_keys_then_values_layer_by_layer():
    """The pool's memory contains the keys and values of layer 0, then those of layer 1, and so on."""
    blocks = 3
    memory = torch.arange(LAYOUT.pool_bytes(blocks) // 4, dtype=torch.float32)
    pool = KvPool(LAYOUT, blocks, memory.view(torch.uint8))
    offset = 0
    for i, layer in enumerate(LAYOUT.layers):
        for part, dim in ((pool.keys(i), layer.key_dim), (pool.values(i), layer.value_dim)):
            assert part.shape == (blocks, LAYOUT.block_size, layer.kv_heads, dim)
            assert part.flatten().tolist() == list(range(offset, offset + part.numel()))
            offset += part.numel()
    assert offset == memory.numel()


def test_sees_writes_through_another_mapping(tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(bytes(LAYOUT.pool_bytes(4)))
    with path.open("r+b") as file:
        maps = [mmap.mmap(file.fileno(), 0) for _ in range(2)]
    ours, theirs = (KvPool(LAYOUT, 4, torch.frombuffer(m, dtype=torch.uint8)) for m in maps)
    copy_blocks(filled(blocks=4), range(1, 2), [0, 2], theirs, [3, 1])
    theirs.keys(0)[2, 1, 1, 3] = 42.0
    assert ours.keys(0)[2, 1, 1, 3] == 42.0
    for part in (0, 1):
        expected = filled(blocks=4).block_rows(1)[part][[0, 2]]
        assert torch.equal(ours.block_rows(1)[part][[3, 1]], expected)


def test_block_rows_are_the_bytes_of_blocks():
    """`block_rows` returns the keys and the values of a layer, with one row per block."""
    pool = KvPool(LAYOUT, 4)
    keys, values = pool.block_rows(1)
    assert (keys.shape, values.shape) == ((4, 5 * 6 * 4), (4, 5 * 4 * 4))
    keys[2].fill_(1)
    assert (pool.keys(1)[2] != 0).all()
    assert keys.shape[1] + values.shape[1] == LAYOUT.layer_bytes_per_block(1)


def test_refuses_memory_that_does_not_fit():
    with pytest.raises(ValueError, match="needs"):
        KvPool(LAYOUT, 2, torch.zeros(LAYOUT.pool_bytes(2) - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        KvPool(LAYOUT, 1, torch.zeros(10_000))


@given(data=st.data(), layer=st.integers(0, 2), same_pool=st.booleans())
def test_copy_moves_exactly_these_blocks_of_this_layer(data, layer, same_pool):
    blocks = st.permutations(range(12))
    if data.draw(st.booleans()):
        first, second = data.draw(st.integers(0, 11)), data.draw(st.integers(0, 11))
        count = data.draw(st.integers(0, 12 - max(first, second)))
        taken, put = list(range(first, first + count)), list(range(second, second + count))
    else:
        count = data.draw(st.integers(0, 12))
        taken, put = data.draw(blocks)[:count], data.draw(blocks)[:count]
    if same_pool and set(taken) & set(put):
        return  # the result of overlapping blocks is undefined
    source = filled(seed=1)
    target = source if same_pool else filled(seed=2)
    before = [[part.clone() for part in target.block_rows(i)] for i in range(3)]
    expected = [[part.clone() for part in parts] for parts in before]
    for part, rows in zip(expected[layer], source.block_rows(layer), strict=True):
        part[put] = rows[taken].clone()
    copy_blocks(source, range(layer, layer + 1), taken, target, put)
    for i in range(3):
        for part, wanted in zip(target.block_rows(i), expected[i], strict=True):
            assert torch.equal(part, wanted)


def test_blocks_outside_the_pool_are_an_error():
    pool = KvPool(LAYOUT, 4)
    for taken, put in (([1, 5], [0, 1]), ([1, 3], [0, 4]), ([3], [4]), ([4], [3])):
        with pytest.raises((IndexError, RuntimeError)):
            copy_blocks(pool, range(1), taken, filled(blocks=4), put)
