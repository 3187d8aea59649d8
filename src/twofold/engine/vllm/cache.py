"""Layout of vLLM's KV cache, and its move into memory that peers can access."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, get_kv_cache_spec_kind

from twofold.engine.base import KvGroup, KvLayout, LayerShape
from twofold.errors import ModelError

# Kinds of layers that need a contiguous range of a prompt's blocks for the next token: all, the last ones, or the last.
HANDED_OFF = {
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "chunked_local_attention",
    "mamba",
}


class CacheRegion(NamedTuple):
    """Memory of vLLM's KV cache that has one page for each block.

    All groups of layers take their blocks from one pool, and each group has at most one layer in a region, so a block
    of a region holds the KV, or the state, of one layer.
    """

    page_bytes: int
    layers: list[str]


def cache_regions(config: KVCacheConfig) -> list[CacheRegion]:
    """Return the regions of vLLM's KV cache by address. Raises ModelError if they do not tile the cache."""
    found: dict[int, CacheRegion] = {}
    for tensor in config.kv_cache_tensors:
        # If a block has the pages of all layers, the cache is a single region.
        packed = tensor.layer_stride < tensor.block_stride
        for place, name in enumerate(tensor.layers):
            start = 0 if packed else tensor.offset + place * tensor.layer_stride
            found.setdefault(start, CacheRegion(tensor.block_stride, [])).layers.append(name)
    starts = sorted(found)
    ends = list(accumulate(found[start].page_bytes * config.num_blocks for start in starts))
    if [*starts, *{tensor.size for tensor in config.kv_cache_tensors}] != [0, *ends]:
        raise ModelError("vLLM does not store the blocks of each layer one after the other, and a hand-off needs that")
    return [found[start] for start in starts]


def read_layout(config: KVCacheConfig, cache_dtype: str) -> KvLayout:
    """Return the layout of vLLM's KV cache, with a region as a layer. Raises ModelError for unsupported layouts.

    `cache_dtype` is vLLM's setting of that name.
    """
    order = config.kv_cache_layout or "HN"
    groups = tuple(_group(group, f"{cache_dtype} {order}") for group in config.kv_cache_groups)
    if len(groups) == 1:  # the names of its layers differ between pipeline stages
        groups = (msgspec.structs.replace(groups[0], layers=()),)
    specs = {name: _spec(group, name) for group in config.kv_cache_groups for name in group.layer_names}
    sizes = [each.block_size for each in groups if each.kind != "mamba"]
    size = min(sizes, default=1)
    regions = cache_regions(config)
    first = next(iter(specs.values()))
    if all(isinstance(spec, AttentionSpec) and spec.dtype == first.dtype for spec in specs.values()):
        dtype, heads = first.dtype, [{specs[name].num_kv_heads for name in each.layers} for each in regions]
        shapes = [_shape(each, size * dtype.itemsize, *counts) for each, counts in zip(regions, heads, strict=True)]
    else:
        dtype, shapes = torch.uint8, [_shape(each, size) for each in regions]
    return KvLayout(
        tuple(shapes),
        block_size=size,
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        heads_first=order.index("H") < order.index("N"),
        groups=groups,
    )


def _shape(region: CacheRegion, row_bytes: int, heads: int = 1, *others: int) -> LayerShape:
    heads = 1 if others else heads
    numbers, rest = divmod(region.page_bytes, heads * row_bytes)
    if rest:
        raise ModelError(f"the KV cache of {region.layers[0]} has blocks of {region.page_bytes:,} bytes, not of tokens")
    # A token's key and value together count as one key.
    return LayerShape(kv_heads=heads, key_dim=numbers, value_dim=0)


def _spec(group: KVCacheGroupSpec, layer: str) -> Any:  # noqa: ANN401  (each kind of layer has other attributes)
    spec = group.kv_cache_spec  # of all layers, or one for each
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def _group(group: KVCacheGroupSpec, stored_as: str) -> KvGroup:
    spec = _spec(group, group.layer_names[0])
    kind = get_kv_cache_spec_kind(spec).value
    if kind not in HANDED_OFF or group.host_resident:
        raise ModelError(f"layers of vLLM's kind {kind} (such as {group.layer_names[0]}) cannot be handed off")
    numbers = (*spec.shapes, *spec.dtypes) if kind == "mamba" else (spec.dtype,)
    return KvGroup(
        kind=kind,
        block_size=group.kv_cache_spec.block_size,
        window=getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0,
        stored_as=" ".join((stored_as, *map(str, numbers))),
        layers=tuple(group.layer_names),
    )


def blocks_to_hand_off(
    managers: Iterable[SingleTypeKVCacheManager], block_ids: Sequence[Sequence[int]], computed: int
) -> list[int]:
    """Return the blocks that hold what the next token needs of `computed` tokens, for each group in turn.

    `block_ids` has the blocks of each group. Of a sliding window these are the last blocks, of a state the last block.
    """
    return [
        block
        for manager, ids in zip(managers, block_ids, strict=True)
        for block in ids[
            manager.get_num_skipped_tokens(computed) // manager.block_size : -(-computed // manager.block_size)
        ]
    ]


def move_caches(memory: torch.Tensor, caches: Iterable[object]) -> None:
    """Make the uint8 tensor `memory` the storage of vLLM's KV cache, whose previous contents are lost.

    `caches` has all tensors with this storage, possibly in lists. Raises ModelError if there are others.
    """
    views = list({id(view): view for view in _tensors(caches)}.values())
    storage = memory.untyped_storage()
    previous = StorageWeakRef(views[0].untyped_storage())  # type: ignore[no-untyped-call]
    for view in views:
        # In place, so that vLLM's references stay valid.
        offset = view.storage_offset() + memory.storage_offset() // view.itemsize
        view.set_(storage, offset, view.shape, view.stride())
    if not previous.expired():  # type: ignore[no-untyped-call]
        raise ModelError("vLLM has references to its KV cache that a hand-off does not support")


def _tensors(caches: Iterable[object]) -> Iterator[torch.Tensor]:
    for each in caches:
        if isinstance(each, torch.Tensor):
            yield from (each,) if each._base is None else (each, each._base)  # noqa: SLF001  (a view keeps it)
        elif isinstance(each, list | tuple):
            yield from _tensors(each)
