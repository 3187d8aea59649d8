"""What a tier of cache gives at every capacity: hits and saved time, and from there on what an added GB is worth."""

import msgspec
import numpy as np
import numpy.typing as npt

from twofold.planning.capacity.distances import NEVER, Blocks

Seconds = npt.NDArray[np.float64]
_ROUNDING = 1e-6  # of a block: what was so many blocks in GB is so many again


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What turns blocks into GB and saved time into dollars.

    There are `caches` of equal size, each for a share of `nodes`: one for each, or one for all. A trace of `duration_s`
    seconds had `blocks`. `second_price` is what an instance costs for a second, `gb_price` what a GB costs for an hour.
    """

    caches: int
    nodes: int
    blocks: int
    block_gb: float
    duration_s: float
    accelerators: int
    second_price: float
    gb_price: float

    def blocks_of(self, gb_per_node: float) -> int:
        """What each cache holds where every node has so many GB."""
        return int(gb_per_node * self.nodes / self.caches / self.block_gb + _ROUNDING)

    def gb_of(self, blocks: int) -> float:
        """The GB of each node where every cache holds so many blocks."""
        return blocks * self.block_gb * self.caches / self.nodes


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A capacity and what it gives. `hit_rate` is the share of all blocks that are found here or in tiers above;
    `accelerators` is how many this tier frees on average, and `saved_per_h` what they would cost; `price_per_h` is its
    own."""

    gb_per_node: float
    hit_rate: float
    accelerators: float
    saved_per_h: float
    price_per_h: float

    @property
    def gain_per_h(self) -> float:
        """Dollars of an hour that are left."""
        return self.saved_per_h - self.price_per_h


class Curve:
    """Hits and saved time of one tier at every capacity.

    `least` has the least capacity of a cache, in blocks of this tier, at which each block is found, 0 where a tier
    above has it; `saved_s` the seconds that an instance then saves with it.
    """

    def __init__(self, terms: Terms, least: Blocks, saved_s: Seconds) -> None:
        self.terms = terms
        found = least < NEVER
        places = least[found]
        self._hits = np.cumsum(np.bincount(places, minlength=1))
        self._saved_s = np.cumsum(np.bincount(places, weights=saved_s[found], minlength=1))

    @property
    def full_gb_per_node(self) -> float:
        """The least capacity that more would add nothing to."""
        return self.terms.gb_of(len(self._hits) - 1)

    def at(self, gb_per_node: float) -> Point:
        """What so much gives; what is less than a block is of no use."""
        terms = self.terms
        place = min(terms.blocks_of(gb_per_node), len(self._hits) - 1)
        busy = float(self._saved_s[place]) / terms.duration_s
        return Point(
            gb_per_node=gb_per_node,
            hit_rate=float(self._hits[place]) / terms.blocks,
            accelerators=busy * terms.accelerators,
            saved_per_h=busy * terms.second_price * 3600,
            price_per_h=gb_per_node * terms.nodes * terms.gb_price,
        )

    def best(self) -> Point:
        """The capacity up to which adding pays: what is saved, less what is paid, is most. 0 GB where none pays."""
        terms = self.terms
        saved = self._saved_s / terms.duration_s * terms.second_price * 3600
        paid = np.arange(len(saved)) * (terms.caches * terms.block_gb * terms.gb_price)
        return self.at(terms.gb_of(int(np.argmax(saved - paid))))
