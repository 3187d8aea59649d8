"""What an instance says of its sequences and of itself. Not compiled, see `route`."""

import msgspec

from twofold.request import FinishReason


class Outcome(msgspec.Struct, frozen=True):
    """What an iteration did for one sequence that sampled a token: output token `index`, and what follows."""

    request_id: str
    index: int
    finish_reason: FinishReason | None
    hands_off: bool


class InstanceStatus(msgspec.Struct, frozen=True):
    """The accounts of an instance at one moment, for routers, metrics and health.

    `running` includes the `swapped`. `swaps` counts how often one was swapped out, and `swap_blocks_moved` what went
    out and back, ever. `blocks_cached` hold KV that prompts find, and do so until their memory is wanted, as that
    of `blocks_evicted` was, ever; `blocks_pinned` of them until their time is up, or no others can go.
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
        """Nothing is here and nothing is held."""
        queued = self.waiting + self.running + self.arriving + self.handing_off + self.lease_queue
        return queued == 0 and self.blocks_free == self.blocks_total
