"""Checksums of KV blocks, by which a decode worker detects corrupt hand-offs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.transport.pooled import PooledTransport

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 4),) * 3, block_size=4, dtype="float32", itemsize=4)
BLOCKS = 5


def sums(pool, blocks, *steps):
    made, transport = [0] * len(blocks), PooledTransport()
    transport.engine_pool = pool
    for layers in steps or (range(3),):
        transport.add_checksums(layers, blocks, made, landed=False)
    return made


def random_pool():
    memory = torch.randint(0, 256, (LAYOUT.pool_bytes(BLOCKS),), dtype=torch.uint8)
    return KvPool(LAYOUT, BLOCKS, memory), memory


def test_checksums_depend_on_contents_only():
    pool, _ = random_pool()
    other = KvPool(LAYOUT, BLOCKS)
    for layer in range(3):
        for ours, theirs in zip(pool.block_rows(layer), other.block_rows(layer), strict=True):
            theirs[[4, 0]] = ours[[1, 3]]
    assert sums(other, [4, 0]) == sums(pool, [1, 3], range(1), range(1, 3))


@given(st.data())
def test_checksums_detect_any_changed_byte(data):
    pool, memory = random_pool()
    before = sums(pool, range(BLOCKS))
    memory[data.draw(st.integers(0, len(memory) - 1))] ^= data.draw(st.integers(1, 255))
    after = sums(pool, range(BLOCKS))
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
