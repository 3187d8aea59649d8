"""Moves vLLM's KV cache into memory that peers can access."""

from collections.abc import Mapping, Sequence

import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ModelError


def read_layout(caches: Mapping[str, torch.Tensor], kv_heads: int) -> tuple[KvLayout, int]:
    """Return the layout and the number of blocks of vLLM's KV cache. Raises ModelError for unsupported layouts."""
    # `caches` has a tensor [blocks, heads, block size, numbers] of each layer, in order.
    shapes = {name: _shape(name, cache, kv_heads) for name, cache in caches.items()}
    num_blocks, _, size, _ = next(iter(shapes.values()))
    for name, shape in shapes.items():
        if (shape[0], shape[2]) != (num_blocks, size):
            raise ModelError(f"the KV cache of {name} has another number or size of blocks than the first layer's")
    # The last dimension is a token's key and value together, which counts as one key.
    layers = tuple(LayerShape(kv_heads=heads, key_dim=numbers, value_dim=0) for _, heads, _, numbers in shapes.values())
    dtype = next(iter(caches.values())).dtype
    name = str(dtype).removeprefix("torch.")
    layout = KvLayout(layers, block_size=size, dtype=name, itemsize=dtype.itemsize, heads_first=True)
    return layout, num_blocks


def _shape(name: str, cache: torch.Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    if cache.dim() != 4 or cache.shape[1] != kv_heads or not cache.is_contiguous():
        raise ModelError(
            f"the KV cache of {name} is laid out as {tuple(cache.shape)} with strides {cache.stride()}; a hand-off "
            "needs contiguous layers of [blocks, heads, block size, keys and values]"
        )
    blocks, heads, size, numbers = cache.shape
    return blocks, heads, size, numbers


def move_caches(
    memory: torch.Tensor, layout: KvLayout, num_blocks: int, views: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Make the tensor `memory` the storage of vLLM's KV cache. The previous contents of the KV cache are lost."""
    numbers = memory[: layout.pool_bytes(num_blocks)].view(getattr(torch, layout.dtype))
    storage, offset = numbers.untyped_storage(), numbers.storage_offset()
    for layer, same in enumerate(views):
        for view in same:
            # In place, so that vLLM's references stay valid.
            view.set_(storage, offset, view.shape, view.stride())
        offset += num_blocks * layout.layer_bytes_per_block(layer) // layout.itemsize
