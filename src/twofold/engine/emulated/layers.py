"""A model's layers as an emulated hand-off sees them: in groups, because each costs a wake-up of two threads."""

from itertools import pairwise

from twofold.engine.base import KvLayout, LayerShape

_MOST = 8  # layers of a group


class LayerGroups:
    """A model's layers in groups; `ends[k]` counts the layers up to the end of group k.

    The first and the last group are single layers, because when a layer-wise hand-off may begin, and what it has
    left to send after the prefill, is what a user feels of it. Towards the middle groups are up to 8 layers.
    """

    def __init__(self, layers: int) -> None:
        ends, end, size = [], 0, 1
        while end < layers:
            end += size
            ends.append(end)
            left = layers - end
            size = min(size * 2, _MOST, max(1, (left + 1) // 2))
        self.ends = tuple(ends)
        self.layers = layers

    def __len__(self) -> int:
        return len(self.ends)

    def ready(self, group: int, begin: int, end: int) -> int:
        """When group `group` of a prefill from `begin` to `end` is computed; every layer takes equally long."""
        return begin + (end - begin) * self.ends[group] // self.layers

    def layout(self, kv_bytes_per_token: int, block_size: int) -> KvLayout:
        """A KV cache of that many bytes per token; layer k of it is group k."""
        bounds = [kv_bytes_per_token * end // self.layers for end in (0, *self.ends)]
        shapes = [LayerShape(1, high - low, 0) for low, high in pairwise(bounds)]
        return KvLayout(tuple(shapes), block_size, dtype="emulated", itemsize=1)
