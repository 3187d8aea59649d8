"""vLLM's KV cache: its layout, its move into Twofold's KV memory, and the blocks that a hand-off moves."""

from itertools import count

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from twofold.engine.torch.pool import KvPool, copy_blocks
from twofold.engine.vllm.cache import blocks_to_hand_off, cache_regions, move_caches, read_layout
from twofold.errors import ConfigurationError, ModelError
from twofold.transport.base import MemoryDescriptor, Transport

BLOCKS, HEADS, SIZE, DIM = 5, 2, 4, 3
NUMBERS = 2 * DIM
PAGE = HEADS * SIZE * NUMBERS * 4
SHAPE = {"block_size": SIZE, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=8)
STATE = MambaSpec(block_size=64, shapes=((3, 4), (2, 5)), dtypes=(torch.float32, torch.float32), page_size_padded=PAGE)


def config(*specs, layers=2):
    """Return vLLM's configuration of a cache with `layers` layers of each spec, alternating."""
    names = [
        [f"layers.{place}" for place in range(first, layers * len(specs), len(specs))] for first in range(len(specs))
    ]
    size, stride = layers * BLOCKS * PAGE, BLOCKS * PAGE
    tensors = [KVCacheTensor(size, each, layer_stride=stride, block_stride=PAGE) for each in names]
    groups = [KVCacheGroupSpec(each, spec) for each, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(BLOCKS, tensors, groups)


def caches(made):
    """Return the KV cache of each layer as in vLLM: views of one memory, which groups share."""
    memory = torch.zeros(made.kv_cache_tensors[0].size, dtype=torch.int8).view(torch.float32)
    return [
        memory[place * BLOCKS * PAGE // 4 :][: BLOCKS * PAGE // 4].view(BLOCKS, HEADS, SIZE, NUMBERS)
        for tensor in made.kv_cache_tensors
        for place in range(len(tensor.layers))
    ]


def moved(made):
    tensors = caches(made)
    others = [cache.view(cache.shape) for cache in tensors]
    layout = read_layout(made, "auto")
    memory = torch.zeros(layout.pool_bytes(BLOCKS) + 128, dtype=torch.uint8)[64:]
    move_caches(memory, [*tensors, others])
    return tensors, others, KvPool(layout, BLOCKS, memory)


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW, FULL), (STATE, FULL)], ids=["full", "windows", "states"])
def test_the_layout_counts_every_byte(specs):
    made = config(*specs)
    layout = read_layout(made, "auto")
    assert layout.block_size == SIZE
    assert [layout.layer_bytes_per_block(layer) for layer in range(2)] == [PAGE, PAGE]
    assert layout.pool_bytes(BLOCKS) == made.kv_cache_tensors[0].size
    assert [group.kind for group in layout.groups] == [
        {FULL: "full_attention", WINDOW: "sliding_window", STATE: "mamba"}[spec] for spec in specs
    ]
    assert layout.kv_heads == ([1, 1] if STATE in specs else [HEADS, HEADS])


def test_layers_of_different_groups_share_regions():
    regions = cache_regions(config(WINDOW, WINDOW, FULL))
    assert [region.layers for region in regions] == [
        [f"layers.{n}" for n in (0, 1, 2)],
        [f"layers.{n}" for n in (3, 4, 5)],
    ]


def test_blocks_with_all_layers_are_one_region():
    made = config(FULL)
    packed = KVCacheTensor(2 * BLOCKS * PAGE, ["layers.0", "layers.1"], layer_stride=PAGE, block_stride=2 * PAGE)
    made.kv_cache_tensors = [packed]
    assert [layer.key_dim for layer in read_layout(made, "auto").layers] == [2 * NUMBERS]


def test_all_views_write_to_the_pool():
    """After `move_caches`, a write through any view of a KV cache tensor changes the memory of the `KvPool`."""
    tensors, others, pool = moved(config(FULL))
    for layer, (one, other) in enumerate(zip(tensors, others, strict=True)):
        one[3].fill_(float(layer + 1))
        assert torch.equal(one, other)
        (rows,) = pool.block_rows(layer)
        assert (rows[3].view(torch.float32) == layer + 1).all()
        assert (rows[2] == 0).all()


def test_copies_blocks_between_moved_caches():
    source, _, source_pool = moved(config(WINDOW, FULL))
    target, _, target_pool = moved(config(WINDOW, FULL))
    values = count(1)
    for cache in source:
        cache[[4, 1, 2]] = float(next(values))
    for region in range(2):
        copy_blocks(source_pool, range(region, region + 1), [4, 1, 2], target_pool, [0, 3, 2])
    for ours, theirs in zip(source, target, strict=True):
        assert torch.equal(theirs[[0, 3, 2]], ours[[4, 1, 2]])
        assert (theirs[[1, 4]] == 0).all()


def test_refuses_views_that_stay_behind():
    made = config(FULL)
    tensors = caches(made)
    memory = torch.zeros(read_layout(made, "auto").pool_bytes(BLOCKS), dtype=torch.uint8)
    with pytest.raises(ModelError, match="references to its KV cache"):
        move_caches(memory, tensors[:1])


def test_refuses_other_memory_layouts():
    made = config(FULL)
    made.kv_cache_tensors = [KVCacheTensor(2 * BLOCKS * PAGE, ["layers.0", "layers.1"], BLOCKS * PAGE, PAGE // HEADS)]
    with pytest.raises(ModelError, match="one after the other"):
        read_layout(made, "auto")


def test_refuses_kinds_that_need_other_blocks():
    with pytest.raises(ModelError, match="kind cross_attention"):
        read_layout(config(CrossAttentionSpec(**SHAPE)), "auto")


@pytest.mark.parametrize(
    "other",
    [config(FULL, FULL), config(SlidingWindowSpec(**SHAPE, sliding_window=16), FULL), config(FULL, WINDOW)],
    ids=["no window", "wider window", "other layers"],
)
def test_ends_with_different_groups_do_not_connect(other):
    ours, theirs = (
        MemoryDescriptor(instance=name, epoch=0, address="", num_blocks=BLOCKS, layout=read_layout(made, "auto"))
        for name, made in (("ours", config(WINDOW, FULL)), ("theirs", other))
    )
    assert ours.layout == read_layout(config(WINDOW, FULL), "auto")
    transport = Transport()
    transport.descriptor = ours
    with pytest.raises(ConfigurationError, match="different KV layouts"):
        transport.connect(theirs)


def test_layouts_differ_by_number_format_and_order():
    made, other = config(FULL), config(FULL)
    other.kv_cache_layout = "LBNHC"
    formats = [read_layout(made, "fp8_e4m3"), read_layout(made, "fp8_e5m2"), read_layout(other, "fp8_e5m2")]
    assert len(set(formats)) == 3


@pytest.mark.parametrize(
    ("computed", "window"), [(1, [0]), (4, [0]), (8, [0, 1]), (11, [1, 2]), (12, [1, 2]), (13, [1, 2, 3])]
)
def test_hands_off_the_blocks_that_the_next_token_needs(computed, window):
    """A full group hands off all blocks, a window its last ones, and a state one; blocks allocated ahead stay."""
    pool = BlockPool(64, enable_caching=False, hash_block_size=SIZE)
    made = {"block_pool": pool, "enable_caching": False, "kv_cache_group_id": 0, "scheduler_block_size": SIZE}
    managers = [FullAttentionManager(FULL, **made), SlidingWindowManager(WINDOW, **made), MambaManager(STATE, **made)]
    full, windowed, state = [*range(10, 16)], [*range(20, 26)], [30]
    blocks = blocks_to_hand_off(managers, [full, windowed, state], computed)
    assert blocks == [*full[: -(-computed // SIZE)], *(windowed[place] for place in window), 30]
