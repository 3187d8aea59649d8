"""What lies in the blocks of an instance and of its host: whose KV, and which part of it."""

from collections.abc import Iterable, Sequence

from twofold.batch import Batch
from twofold.kvcache.blocks import BlockManager
from twofold.scheduling.growth import Copy
from twofold.scheduling.instance import InstanceScheduler


class KvContents:
    """Memory as a worker treats it, at its worst: what is to be copied before a batch is copied as late as can be.

    Peers may write a lease's blocks from the moment that it is granted, and do so at once.
    """

    def __init__(self, instance: InstanceScheduler) -> None:
        self._instance = instance
        self._size = instance.blocks.block_size
        self._here: dict[int, tuple[str, int]] = {}
        self._host: dict[int, tuple[str, int] | None] = {}
        self._tables: dict[str, Sequence[int]] = {}
        self._copies: list[Copy] = []

    @property
    def known(self) -> bool:
        return isinstance(self._instance.blocks, BlockManager)

    def leased(self, request_id: str, blocks: Iterable[int]) -> None:
        for place, block in enumerate(blocks):
            self._here[block] = (request_id, place)

    def begins(self, batch: Batch, copies: list[Copy]) -> None:
        """A batch was started; nothing of it has been done yet."""
        self._copies = copies
        self._tables = {i.request_id: tuple(self._instance.blocks_of(i.request_id)) for i in batch.items}

    def ends(self, batch: Batch, gone: Iterable[str]) -> None:
        """Only now its work is done: each sequence that is still wanted finds its own KV where it was."""
        for copy in self._copies:
            for here, there in zip(copy.device_blocks, copy.host_blocks, strict=True):
                if copy.out:
                    self._host[there] = self._here.get(here)
                else:
                    self._here[here] = self._host[there] or ("nobody", -1)
        for item in batch.items:
            table, start, end = self._tables[item.request_id], item.context_tokens, item.context_tokens
            end += item.num_tokens
            if item.request_id not in gone:
                filled = -(-start // self._size)
                found = [self._here.get(block) for block in table[:filled]]
                assert found == [(item.request_id, place) for place in range(filled)], "KV of somebody else"
                assert end <= len(table) * self._size, "it writes beyond its blocks"
            for place in range(start // self._size, min(len(table), -(-end // self._size))):
                self._here[table[place]] = (item.request_id, place)
