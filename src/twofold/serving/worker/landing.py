"""Where leased blocks land: in the memory that the engine computes on, unless something else is said."""

from collections.abc import Sequence


class Landing:
    """Peers write into the engine's own pool, so that what has landed is where it has to be.

    `PoolLanding` is for engines whose pool peers cannot write into.
    """

    def landed(self, request_id: str, blocks: Sequence[int]) -> None:
        """These blocks are complete; they are brought over before the next batch."""

    def take(self) -> list[Sequence[int]]:
        """The blocks to bring over now; to be called where `landed` is."""
        return []

    def drop(self, request_id: str) -> None:
        """The request is over: its blocks may be given to another."""

    def bring(self, block_lists: Sequence[Sequence[int]]) -> None:
        """Copy all layers of these blocks; to be called by the thread that runs the engine."""
