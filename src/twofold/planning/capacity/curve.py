"""LRU stack distances: what a cache of every size would hit, from one pass over a trace.

A cache that evicts the least recently used block holds, at any size, the blocks that were used last: a larger one has
all that a smaller one has (Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 1970). So
each use of a block has a least capacity at which it is a hit, and these are all there is to know. Where tiers hand down
what they evict and bring up what is used, the first has the top of the same stack and the next ones what follows.

How much prefill each block of a prompt saves when it is there: seconds of an instance, by a performance model.

What a tier of cache gives at every capacity: hits and saved time, and from there on what an added GB is worth.
"""

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from twofold.performance.base import PerformanceModel
from twofold.performance.reuse import reuse_s
from twofold.request import BlockKey
from twofold.workload.rescale import BLOCK_TOKENS

Blocks = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


def least_capacities(prompts: Sequence[Sequence[BlockKey]]) -> Blocks:
    """For each block of each prompt, one after the other, the smallest cache in which that request finds it.

    A block is found only where all blocks before it are, so this never falls within a prompt. Requests come in order,
    and use or store their blocks in order. In blocks; NEVER where no cache is large enough. Exact for caches that have
    room for a whole prompt: in a smaller one it would push out its own beginning, which `PrefixCache` does not do.
    """
    keys = list(chain.from_iterable(prompts))
    distances = np.minimum(stack_distances(keys), len(keys) + 1)
    # The greatest so far within each prompt: those of later prompts are lifted above all of earlier ones.
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    lift = np.repeat(np.arange(len(prompts)), lengths) * (len(keys) + 2)
    least = np.maximum.accumulate(distances + lift) - lift
    return np.where(least > len(keys), NEVER, least)


def stack_distances(keys: Sequence[BlockKey]) -> Blocks:
    """For each use of a key the smallest LRU cache that has it then; NEVER for the first use of each."""
    previous = _previous(keys)
    again = np.flatnonzero(previous >= 0)
    last = previous[again]
    # Between the two uses of a key lie others; those that were used more than once there are counted once.
    distances = np.full(len(keys), NEVER)
    distances[again] = again - last - _greater_before(last)
    return distances


def _previous(keys: Sequence[BlockKey]) -> Blocks:
    """The place where each key was used last, −1 where it was not."""
    latest: dict[BlockKey, int] = {}
    previous = []
    for place, key in enumerate(keys):
        previous.append(latest.get(key, -1))
        latest[key] = place
    return np.array(previous, dtype=np.int64)


def _greater_before(values: Blocks) -> Blocks:
    """For each value how many of those before it are greater. Values are different from each other and not negative.

    Bit by bit, from the highest: of two values that agree in all bits above, the one with a 1 is greater. All values
    are kept in groups that agree so far, in the order they came in, so that a running count of ones says how many came
    before. Takes n·log n steps, all of them numpy's.
    """
    count = np.zeros(len(values), dtype=np.int64)
    order = np.arange(len(values))
    for bit in reversed(range(int(values.max(initial=0)).bit_length())):
        prefix = values[order] >> bit
        one = prefix & 1
        ones_before = np.cumsum(one) - one
        starts = np.flatnonzero(np.diff(prefix >> 1, prepend=-1))
        of_earlier_groups = np.repeat(ones_before[starts], np.diff(starts, append=len(order)))
        count[order] += np.where(one == 0, ones_before - of_earlier_groups, 0)
        order = order[np.argsort(prefix, kind="stable")]
    return count


def savings_s(model: PerformanceModel, prompt_tokens: int, loads_s: Sequence[float]) -> list[float]:
    """For each of the leading blocks of a prompt the seconds that it saves beyond what those before it do.

    `loads_s` are what loading each of them takes, in order; it hides behind computing the rest of the prompt. Blocks
    that would take longer to load than to compute are computed and save nothing. At least the last token of a prompt
    is always computed: it makes the first of the output.
    """
    whole_s = model.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
    most_s = load_s = 0.0
    gains = []
    for number, block_s in enumerate(loads_s, start=1):
        load_s += block_s
        reused = min(number * BLOCK_TOKENS, prompt_tokens - 1)
        saved_s = max(most_s, whole_s - reuse_s(model, prompt_tokens, reused, load_s))
        gains.append(saved_s - most_s)
        most_s = saved_s
    return gains


Seconds = npt.NDArray[np.float64]
_ROUNDING = 1e-6  # of a block: what was so many blocks in GB is so many again


class CapacityTerms(msgspec.Struct, frozen=True, kw_only=True):
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


class CapacityPoint(msgspec.Struct, frozen=True, kw_only=True):
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


class CapacityCurve:
    """Hits and saved time of one tier at every capacity.

    `least` has the least capacity of a cache, in blocks of this tier, at which each block is found, 0 where a tier
    above has it; `saved_s` the seconds that an instance then saves with it.
    """

    def __init__(self, terms: CapacityTerms, least: Blocks, saved_s: Seconds) -> None:
        self.terms = terms
        found = least < NEVER
        places = least[found]
        self._hits = np.cumsum(np.bincount(places, minlength=1))
        self._saved_s = np.cumsum(np.bincount(places, weights=saved_s[found], minlength=1))

    @property
    def full_gb_per_node(self) -> float:
        """The least capacity that more would add nothing to."""
        return self.terms.gb_of(len(self._hits) - 1)

    def at(self, gb_per_node: float) -> CapacityPoint:
        """What so much gives; what is less than a block is of no use."""
        terms = self.terms
        place = min(terms.blocks_of(gb_per_node), len(self._hits) - 1)
        busy = float(self._saved_s[place]) / terms.duration_s
        return CapacityPoint(
            gb_per_node=gb_per_node,
            hit_rate=float(self._hits[place]) / terms.blocks,
            accelerators=busy * terms.accelerators,
            saved_per_h=busy * terms.second_price * 3600,
            price_per_h=gb_per_node * terms.nodes * terms.gb_price,
        )

    def best(self) -> CapacityPoint:
        """The capacity up to which adding pays: what is saved, less what is paid, is most. 0 GB where none pays."""
        terms = self.terms
        saved = self._saved_s / terms.duration_s * terms.second_price * 3600
        paid = np.arange(len(saved)) * (terms.caches * terms.block_gb * terms.gb_price)
        return self.at(terms.gb_of(int(np.argmax(saved - paid))))
