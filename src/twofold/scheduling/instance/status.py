"""Status of an instance."""

import msgspec


# This module is not compiled by mypyc, because the status is a msgspec struct.
class InstanceStatus(msgspec.Struct, frozen=True):
    """Numbers of sequences and blocks of an instance, for routers, metrics and health checks."""

    waiting: int
    running: int  # includes swapped sequences
    arriving: int
    handing_off: int
    lease_queue: int
    blocks_total: int
    blocks_free: int
    blocks_in_flight: int
    swapped: int = 0
    swaps: int = 0  # swap-outs since the start
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    swap_blocks_moved: int = 0  # blocks copied in either direction since the start
    blocks_cached: int = 0
    blocks_evicted: int = 0  # from the prefix cache since the start
    blocks_pinned: int = 0  # part of `blocks_cached`

    @property
    def idle(self) -> bool:
        """Whether the instance has no requests and all its blocks are free."""
        queued = self.waiting + self.running + self.arriving + self.handing_off + self.lease_queue
        return queued == 0 and self.blocks_free == self.blocks_total
