"""vLLM's KV cache tensors, allocated in Twofold's KV memory."""

import pytest
import torch

from twofold.engine.torch.pool import KvPool, copy_blocks
from twofold.engine.vllm.cache import move_caches, read_layout
from twofold.errors import ModelError

LAYERS, BLOCKS, HEADS, SIZE, NUMBERS = 3, 5, 2, 4, 6


def caches():
    """Return one KV cache per layer, all views of one tensor as in vLLM."""
    memory = torch.zeros(LAYERS * BLOCKS * HEADS * SIZE * NUMBERS)
    shape = (LAYERS, BLOCKS, HEADS, SIZE, NUMBERS)
    return {f"layer {k}": view for k, view in enumerate(memory.view(shape))}


def moved():
    made = caches()
    layout, num_blocks = read_layout(made, HEADS)
    others = [cache.view(cache.shape) for cache in made.values()]
    memory = torch.zeros(layout.pool_bytes(num_blocks) + 64, dtype=torch.uint8)
    move_caches(memory, layout, num_blocks, list(zip(made.values(), others, strict=True)))
    return list(made.values()), others, KvPool(layout, num_blocks, memory)


def test_the_layout_counts_every_byte():
    layout, num_blocks = read_layout(caches(), HEADS)
    assert num_blocks == BLOCKS
    assert layout.block_size == SIZE
    assert layout.layer_bytes_per_block(0) == HEADS * SIZE * NUMBERS * 4
    assert layout.pool_bytes(num_blocks) == sum(cache.nbytes for cache in caches().values())


def test_all_views_write_to_the_pool():
    """After `move_caches`, a write through any view of a KV cache tensor changes the memory of the `KvPool`."""
    tensors, others, pool = moved()
    for layer, (one, other) in enumerate(zip(tensors, others, strict=True)):
        one[3].fill_(float(layer + 1))
        assert torch.equal(one, other)
        (rows,) = pool.block_rows(layer)
        assert (rows[3].view(torch.float32) == layer + 1).all()
        assert (rows[2] == 0).all()


def test_copies_blocks_between_moved_caches():
    source, _, source_pool = moved()
    target, _, target_pool = moved()
    for layer, cache in enumerate(source):
        cache.copy_(torch.rand_like(cache))
        copy_blocks(source_pool, range(layer, layer + 1), [4, 1, 2], target_pool, [0, 3, 2])
        assert torch.equal(target[layer][[0, 3, 2]], cache[[4, 1, 2]])
        assert (target[layer][[1, 4]] == 0).all()


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, BLOCKS, SIZE, HEADS, NUMBERS),
        torch.zeros(BLOCKS, SIZE, HEADS, NUMBERS).transpose(1, 2),
        torch.zeros(BLOCKS, HEADS + 1, SIZE, NUMBERS),
    ],
    ids=["keys and values apart", "not one run of bytes", "other heads"],
)
def test_refuses_other_memory_layouts(cache):
    with pytest.raises(ModelError, match="is laid out as"):
        read_layout({"layer 0": cache}, HEADS)


def test_refuses_layers_with_different_blocks():
    first, second = torch.zeros(BLOCKS, HEADS, SIZE, NUMBERS), torch.zeros(BLOCKS + 1, HEADS, SIZE, NUMBERS)
    with pytest.raises(ModelError, match="another number or size of blocks"):
        read_layout({"layer 0": first, "layer 1": second}, HEADS)
