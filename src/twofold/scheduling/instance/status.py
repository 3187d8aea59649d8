"""The status of an instance. This module is not compiled, because messages contain the status."""

import msgspec


class InstanceStatus(msgspec.Struct, frozen=True):
    """Counts of an instance at one moment, for routers, metrics and health.

    `running` includes the `swapped` sequences. `swaps` counts all swap-outs so far, `swap_blocks_moved` the blocks
    copied in both directions. `blocks_cached` hold KV of the prefix cache, `blocks_pinned` of them for a guaranteed
    time; `blocks_evicted` counts all evictions so far.
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
        """Whether the instance has no request and holds no block."""
        queued = self.waiting + self.running + self.arriving + self.handing_off + self.lease_queue
        return queued == 0 and self.blocks_free == self.blocks_total
