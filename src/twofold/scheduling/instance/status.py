"""Status of an instance. mypyc does not compile this module: the status is a msgspec struct, sent in messages."""

import msgspec


class InstanceStatus(msgspec.Struct, frozen=True):
    """Current numbers of sequences and blocks of an instance, for routers, metrics and health checks.

    `running` includes the `swapped` sequences. Three fields count events since the start: `swaps` counts swap-outs,
    `swap_blocks_moved` blocks copied in either direction, and `blocks_evicted` evictions from the prefix cache.
    `blocks_cached` is the current number of blocks in the prefix cache, and `blocks_pinned` the number of pinned blocks
    among them.
    """

    waiting: int
    running: int
    arriving: int
    handing_off: int
    lease_queue: int
    blocks_total: int
    blocks_free: int
    blocks_in_flight: int
    swapped: int = 0
    swaps: int = 0
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    swap_blocks_moved: int = 0
    blocks_cached: int = 0
    blocks_evicted: int = 0
    blocks_pinned: int = 0

    @property
    def idle(self) -> bool:
        """Whether the instance has no requests and all its blocks are free."""
        queued = self.waiting + self.running + self.arriving + self.handing_off + self.lease_queue
        return queued == 0 and self.blocks_free == self.blocks_total
