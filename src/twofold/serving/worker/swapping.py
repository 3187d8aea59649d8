"""Where a worker swaps sequences out to: memory of its host, beside the one that its engine computes on."""

from collections.abc import Sequence
from typing import Protocol

from twofold.scheduling.growth import Copy


class SwapSpace(Protocol):
    """`num_blocks` blocks like those of the engine."""

    @property
    def num_blocks(self) -> int: ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy all layers of these blocks, one sequence after the other; to be called by the thread that runs the
        engine, before the batch that they came with."""
        ...
