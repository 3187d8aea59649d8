"""Clocks, and the times at which an emulated engine has computed the KV of prompts, layer by layer."""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from twofold.cluster.timing import PS
from twofold.engine.base import KvLayout, LayerShape


class Clock(Protocol):
    """A clock in whole picoseconds."""

    def now(self) -> int: ...

    def sleep_until(self, moment: int) -> None:
        """Return at `moment` or later, at once if it has passed."""


class MonotonicClock:
    """The host's monotonic clock, shared by all its processes."""

    def now(self) -> int:
        return time.monotonic_ns() * (PS // 10**9)

    def sleep_until(self, moment: int) -> None:
        while (left := moment - self.now()) > 0:
            time.sleep(left / PS)


_MAX_GROUP = 8


class LayerGroups:
    """Groups of layers that become ready together: each group costs a wake-up of two threads.

    Group k ends with layer `ends[k]` − 1. The first and the last groups are single layers, because the start of
    a layer-wise hand-off and its remainder after the prefill affect latency. Groups towards the middle have up
    to 8 layers.
    """

    def __init__(self, layers: int) -> None:
        ends, end, size = [], 0, 1
        while end < layers:
            end += size
            ends.append(end)
            left = layers - end
            size = min(size * 2, _MAX_GROUP, max(1, (left + 1) // 2))
        self.ends = tuple(ends)
        self.layers = layers

    def __len__(self) -> int:
        return len(self.ends)

    def ready(self, group: int, begin: int, end: int) -> int:
        """Return when a group of a prefill from `begin` to `end` is computed; all layers take equally long."""
        return begin + (end - begin) * self.ends[group] // self.layers

    def layout(self, kv_bytes_per_token: int, block_size: int) -> KvLayout:
        """Return the layout of a KV cache with one layer per group."""
        bounds = [kv_bytes_per_token * end // self.layers for end in (0, *self.ends)]
        shapes = [LayerShape(1, high - low, 0) for low, high in pairwise(bounds)]
        return KvLayout(tuple(shapes), block_size, dtype="emulated", itemsize=1)


class PrefillTimes:
    """The times of an instance's prefills, which its emulated link needs to send layers.

    A prompt is identified by its last block, which no other prompt has until the hand-off has ended. Shared
    blocks are always earlier ones.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self.groups = groups
        self._spans: dict[int, tuple[int, int]] = {}

    def note(self, block_tables: Iterable[Sequence[int]], begin: int, end: int) -> None:
        """Record that the prompts in these blocks are computed between the picoseconds `begin` and `end`."""
        for blocks in block_tables:
            self._spans[blocks[-1]] = begin, end

    def ready(self, blocks: Sequence[int], group: int) -> int:
        """Return when a group of layers of the prompt in these blocks is computed."""
        return self.groups.ready(group, *self._spans[blocks[-1]])

    def end(self, blocks: Sequence[int]) -> int:
        """Return when the prompt in these blocks is computed."""
        return self._spans[blocks[-1]][1]
