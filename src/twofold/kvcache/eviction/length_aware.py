"""LFU that evicts the ends of prompts first."""

from twofold.kvcache.eviction.base import RankedEviction
from twofold.request import BlockKey

_POSITION_BITS = 24  # a prompt has fewer than 2^24 blocks


class LengthAware(RankedEviction):
    """Evicts the block with the fewest uses since it was stored; of several, the one latest in its prompt.

    A block is useful only together with all blocks before it, so the end of a prompt is worth least. Source: the
    LengthAwareCache of Mooncake (arXiv 2407.00079 section 4, Table 1).
    """

    help = "least frequently used, ends of prompts first"

    def __init__(self) -> None:
        super().__init__(step=1 << _POSITION_BITS)  # uses in the high bits, minus the position

    def stored(self, key: BlockKey, position: int) -> None:
        self.add(key, (1 << _POSITION_BITS) - position)
