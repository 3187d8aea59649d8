"""vLLM's KV cache, moved into memory that peers can reach."""

from collections.abc import Mapping, Sequence

import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ModelError


def read_layout(caches: Mapping[str, torch.Tensor], kv_heads: int) -> tuple[KvLayout, int]:
    """How these layers' caches lie in memory, and their number of blocks.

    `caches` are as vLLM made them, by layer and in the order of layers: [blocks, heads, block size, numbers], where
    the numbers are those of a key and of a value, one behind the other. So keys and values of a block are one run
    of bytes, and `KvLayout` calls all of it keys. Raises ModelError for memory that is not of this kind.
    """
    shapes = []
    first = next(iter(caches.values()))
    for name, cache in caches.items():
        blocks, heads, size, numbers = _shape(name, cache, kv_heads)
        if (blocks, size) != (first.shape[0], _shape(name, first, kv_heads)[2]):
            raise ModelError(f"the KV cache of {name} has other blocks than that of the first layer")
        shapes.append(LayerShape(kv_heads=heads, key_dim=numbers, value_dim=0))
    dtype = str(first.dtype).removeprefix("torch.")
    size = _shape("the first layer", first, kv_heads)[2]
    layout = KvLayout(layers=tuple(shapes), block_size=size, dtype=dtype, itemsize=first.dtype.itemsize)
    return layout, int(first.shape[0])


def _shape(name: str, cache: torch.Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    if cache.dim() != 4 or cache.shape[1] != kv_heads or not cache.is_contiguous():
        raise ModelError(
            f"the KV cache of {name} is laid out as {tuple(cache.shape)} with strides {cache.stride()}; a hand-off "
            "needs each layer's blocks one behind the other, as [blocks, heads, block size, keys and values]"
        )
    blocks, heads, size, numbers = cache.shape
    return blocks, heads, size, numbers


def move_caches(
    memory: torch.Tensor, layout: KvLayout, num_blocks: int, views: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Let all views of each layer's cache, whoever holds them, lie in `memory` [bytes] of uint8 from now on.

    The tensors stay the same objects, so nothing that holds one has to be told. What they held is lost.
    """
    numbers = memory[: layout.pool_bytes(num_blocks)].view(getattr(torch, layout.dtype))
    storage, offset = numbers.untyped_storage(), numbers.storage_offset()
    for layer, same in enumerate(views):
        for view in same:
            view.set_(storage, offset, view.shape, view.stride())
        offset += num_blocks * layout.layer_bytes_per_block(layer) // layout.itemsize
