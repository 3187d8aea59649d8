"""The clock of emulated engines and links: picoseconds that pass by themselves.

A model's layers as an emulated hand-off sees them: in groups, because each costs a wake-up of two threads.

Which prompts an emulated engine computes, and when each of their layers is ready.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from twofold.cluster.timing import PS
from twofold.engine.base import KvLayout, LayerShape


class Clock(Protocol):
    """Tells the time and waits, in whole picoseconds of one clock."""

    def now(self) -> int: ...

    def sleep_until(self, moment: int) -> None:
        """Return no earlier than at `moment`; at once if it is past."""
        ...


class MonotonicClock:
    """The host's monotonic clock, which is the same in all its processes."""

    def now(self) -> int:
        return time.monotonic_ns() * (PS // 10**9)

    def sleep_until(self, moment: int) -> None:
        while (left := moment - self.now()) > 0:
            time.sleep(left / PS)


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


class PrefillTimes:
    """What the link of an instance needs to know of its engine: when the KV that it is to send was computed.

    The engine notes each prompt under its last block, which no other can have until its hand-off is over: prompts share
    the blocks that they begin with, and each computes the end of its own.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self.groups = groups
        self._spans: dict[int, tuple[int, int]] = {}

    def note(self, block_tables: Iterable[Sequence[int]], begin: int, end: int) -> None:
        """The prompts in these blocks are computed from picosecond `begin` to `end`."""
        for blocks in block_tables:
            self._spans[blocks[-1]] = begin, end

    def ready(self, blocks: Sequence[int], group: int) -> int:
        """When a group of layers of the prompt in these blocks is computed."""
        return self.groups.ready(group, *self._spans[blocks[-1]])

    def end(self, blocks: Sequence[int]) -> int:
        """When all of it is computed."""
        return self._spans[blocks[-1]][1]
