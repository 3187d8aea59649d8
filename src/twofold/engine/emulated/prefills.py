"""Which prompts an emulated engine computes, and when each of their layers is ready."""

from collections.abc import Iterable, Sequence

from twofold.engine.emulated.layers import LayerGroups


class Prefills:
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
