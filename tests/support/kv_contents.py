"""A model of KV memory that checks whether batches read the right KV."""

from collections.abc import Callable, Iterable, Sequence

from twofold.batch import Batch
from twofold.handoff import Lease
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import BlockKey
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import BlockCopy

Label = BlockKey | tuple[str, int]


class KvContents:
    """Model of an instance's KV blocks, which checks that each batch reads the KV of its own requests."""

    def __init__(
        self,
        instance: InstanceScheduler,
        keys_of: Callable[[str], Sequence[BlockKey]] = lambda _: (),
        prompt_blocks: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self._instance = instance
        self._keys_of = keys_of  # keys of a request's full blocks; blocks with equal keys are interchangeable
        self._prompt_blocks = prompt_blocks  # of these, those of the prompt
        self._size = instance.blocks.block_size
        self._here: dict[int, Label] = {}
        self._host: dict[int, Label | None] = {}
        self._tables: dict[str, Sequence[int]] = {}
        self._copies: list[BlockCopy] = []
        self._shared_copies: list[tuple[int, int]] = []
        self.shared_copies = 0

    @property
    def known(self) -> bool:
        return isinstance(self._instance.blocks, PagedBlockAllocator)

    def leased(self, lease: Lease, *, torn: bool = False) -> None:
        """Record that a peer has written the KV of a request into leased blocks, completely or in part."""
        request_id = lease.request_id
        for place, block in enumerate(lease.blocks, lease.cached_blocks):
            whole = place < self._prompt_blocks(request_id) and not torn
            self._here[block] = self._whole(request_id, place) if whole else ("torn" if torn else request_id, place)

    def begins(self, batch: Batch, copies: list[BlockCopy]) -> None:
        """Record the state at the start of a batch, for the check in `ends`."""
        self._copies = copies
        self._tables = {i.request_id: tuple(self._instance.blocks_of(i.request_id)) for i in batch.items}
        wanted = (self._instance.copy_of(item.request_id) for item in batch.items)
        self._shared_copies = [copy for copy in wanted if copy is not None]
        self.shared_copies += len(self._shared_copies)

    def ends(self, batch: Batch, gone: Iterable[str]) -> None:
        """Apply the KV writes of an ended batch, and check that the requests have read the right KV.

        Requests whose ids are in `gone` are not checked.
        """
        for copy in self._copies:
            for here, there in zip(copy.device_blocks, copy.host_blocks, strict=True):
                if copy.out:
                    self._host[there] = self._here.get(here)
                else:
                    label = self._host[there]
                    self._here[here] = ("nobody", -1) if label is None else label
        for source, target in self._shared_copies:
            self._here[target] = self._here[source]
        for item in batch.items:
            table, start, end = self._tables[item.request_id], item.context_tokens, item.context_tokens
            end += item.num_tokens
            if item.request_id not in gone:
                for place in range(-(-start // self._size)):
                    found = self._here.get(table[place])
                    partial = (place + 1) * self._size > start and found == (item.request_id, place)
                    assert partial or found == self._whole(item.request_id, place), "KV of another request"
                assert end <= len(table) * self._size, "write beyond the blocks of the sequence"
            for place in range(start // self._size, min(len(table), -(-end // self._size))):
                whole = (place + 1) * self._size <= end
                self._here[table[place]] = self._whole(item.request_id, place) if whole else (item.request_id, place)

    def _whole(self, request_id: str, place: int) -> Label:
        keys = self._keys_of(request_id)
        return keys[place] if place < len(keys) else (request_id, place)
