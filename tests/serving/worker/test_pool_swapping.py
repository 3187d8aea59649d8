"""Swapping of KV blocks to host memory and back."""

import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.serving.worker.torch_parts import swap_blocks

LAYOUT = KvLayout((LayerShape(2, 8, 4), LayerShape(1, 8, 8)), block_size=4, dtype="float32", itemsize=4)


def contents(pool, blocks):
    return [
        part[list(blocks)].clone()
        for layer in range(len(LAYOUT.layers))
        for part in (pool.keys(layer), pool.values(layer))
    ]


def test_swapped_blocks_return_unchanged():
    pool = KvPool(LAYOUT, 8)
    for layer in range(len(LAYOUT.layers)):
        pool.keys(layer).copy_(torch.randn(pool.keys(layer).shape))
        pool.values(layer).copy_(torch.randn(pool.values(layer).shape))
    host = KvPool(LAYOUT, 5)
    first, second = contents(pool, (1, 6, 2)), contents(pool, (0, 7))
    swap_blocks(pool, host, [BlockCopy(True, 3, (1, 6, 2, 3), (0, 1, 2)), BlockCopy(True, 2, (0, 7), (3, 4))])
    for layer in range(len(LAYOUT.layers)):
        pool.keys(layer).zero_()
        pool.values(layer).zero_()
    swap_blocks(pool, host, [BlockCopy(False, 2, (6, 5, 4), (3, 4)), BlockCopy(False, 3, (0, 2, 1), (0, 1, 2))])
    for expected, found in ((first, contents(pool, (0, 2, 1))), (second, contents(pool, (6, 5)))):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
