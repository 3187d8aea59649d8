"""The blocks of vLLM that peers may touch: leased to be written, or read into by ourselves."""

from collections.abc import Callable, Sequence

from twofold.kvcache.accounts import BlockAccounts, Grant


class LentBlocks(BlockAccounts):
    """Blocks that vLLM has allocated to a request whose KV comes from a peer, until all of it is here, or given up.

    vLLM does not free them in that time, whatever happens to the request. When their owner (the request as it
    arrives) has let go of them and nothing touches them any more, `returned(request_id)` is called.
    """

    def __init__(self, num_blocks: int, block_size: int, returned: Callable[[str], None]) -> None:
        super().__init__(num_blocks, block_size)
        self._returned = returned
        self._lent: dict[str, Sequence[int]] = {}

    def lend(self, request_id: str, blocks: Sequence[int]) -> Grant:
        self._lent[request_id] = tuple(blocks)
        return self.allocate(request_id, len(blocks) * self.block_size)

    def blocks_of(self, grant: Grant) -> Sequence[int]:
        return self._lent[grant.owner]

    def _give(self, grant: Grant, blocks: int) -> None:
        """Which ones they are was said by vLLM."""

    def _take_back(self, grant: Grant) -> None:
        del self._lent[grant.owner]
        self._returned(grant.owner)
