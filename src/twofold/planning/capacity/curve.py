"""Hit rate of a cache tier, and accelerator time saved by its hits, at every capacity of the tier.

A larger LRU cache holds all blocks of a smaller LRU cache (Mattson et al., Evaluation techniques for storage
hierarchies, IBM Systems Journal 1970). For each use of a block, there is thus a smallest capacity with a hit. Several
tiers are modelled as one LRU cache, with its most recently used blocks in the first tier.
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
    """Return, for each block of each prompt, the smallest capacity of an LRU cache, in blocks, at which the block hits;
    NEVER if it hits at no capacity. A block hits only if all earlier blocks of its prompt hit. The result is
    approximate for caches smaller than a prompt.
    """
    keys = list(chain.from_iterable(prompts))
    distances = np.minimum(stack_distances(keys), len(keys) + 1)
    # Running maximum within each prompt: later prompts are lifted above all earlier ones.
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    lift = np.repeat(np.arange(len(prompts)), lengths) * (len(keys) + 2)
    least = np.maximum.accumulate(distances + lift) - lift
    return np.where(least > len(keys), NEVER, least)


def stack_distances(keys: Sequence[BlockKey]) -> Blocks:
    """Return, for each use of a key, the size of the smallest LRU cache in which it hits; NEVER for the first use."""
    previous = _previous(keys)
    again = np.flatnonzero(previous >= 0)
    last = previous[again]
    # Keys between the two uses of a key; repeated ones count once.
    distances = np.full(len(keys), NEVER)
    distances[again] = again - last - _greater_before(last)
    return distances


def _previous(keys: Sequence[BlockKey]) -> Blocks:
    """Return, for each position in `keys`, the previous position of the same key; −1 for its first position."""
    latest: dict[BlockKey, int] = {}
    previous = []
    for place, key in enumerate(keys):
        previous.append(latest.get(key, -1))
        latest[key] = place
    return np.array(previous, dtype=np.int64)


def _greater_before(values: Blocks) -> Blocks:
    """Return, for each value, the number of greater values before it. Values must be distinct and not negative. The
    function takes O(n log n) time. It goes through the bits from the highest to the lowest, in groups of values that
    agree in all higher bits. A value with a 0 in this bit is smaller than all values of its group with a 1.
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
    """Return, for each block of a cached prefix, the prefill seconds saved by loading this block after all earlier
    blocks. `loads_s` has the load time of each block in seconds. Loads overlap with computing the rest of the prompt;
    the last token is always computed. A block that loads more slowly than it is computed saves nothing.
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
_ROUNDING = 1e-6  # of a block, so that converting blocks to GB and back is exact


class CapacityTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Factors that convert cache blocks to GB, and saved time to accelerators and dollars. The cache tier has `caches`
    equal caches, one per node or one for all `nodes`, and costs `gb_price` dollars per GB and hour. The trace has
    `blocks` blocks in `duration_s` s. An instance has `accelerators` accelerators and costs `second_price` dollars/s.
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
        """Return the number of blocks that fit into each cache if the tier has `gb_per_node` GB per node."""
        return int(gb_per_node * self.nodes / self.caches / self.block_gb + _ROUNDING)

    def gb_of(self, blocks: int) -> float:
        """Return the GB per node that the tier needs if each cache has room for `blocks` blocks."""
        return blocks * self.block_gb * self.caches / self.nodes


class CapacityPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate and value of a cache tier at one capacity. `hit_rate` is the share of the trace's blocks found in this
    or a higher tier. Hits in this tier free `accelerators` accelerators on average, worth `saved_per_h` dollars per
    hour. The tier costs `price_per_h` dollars per hour.
    """

    gb_per_node: float
    hit_rate: float
    accelerators: float
    saved_per_h: float
    price_per_h: float

    @property
    def gain_per_h(self) -> float:
        """Net savings in dollars per hour: price of the freed accelerators minus price of the tier."""
        return self.saved_per_h - self.price_per_h


class CapacityCurve:
    """Hit rate and value of one cache tier at every capacity. `least` is the smallest capacity of this tier, in blocks,
    at which each block of the trace hits: 0 if a higher tier holds the block, NEVER if no capacity suffices. `saved_s`
    is the instance time saved by each hit, in seconds.
    """

    def __init__(self, terms: CapacityTerms, least: Blocks, saved_s: Seconds) -> None:
        self.terms = terms
        found = least < NEVER
        places = least[found]
        self._hits = np.cumsum(np.bincount(places, minlength=1))
        self._saved_s = np.cumsum(np.bincount(places, weights=saved_s[found], minlength=1))

    @property
    def full_gb_per_node(self) -> float:
        """Smallest capacity, in GB per node, that reaches the highest hit rate."""
        return self.terms.gb_of(len(self._hits) - 1)

    def at(self, gb_per_node: float) -> CapacityPoint:
        """Evaluate the tier with a capacity of `gb_per_node` GB per node, rounded down to whole blocks."""
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
        """Return the point with the highest net savings, which is the point at 0 GB if no capacity saves money."""
        terms = self.terms
        saved = self._saved_s / terms.duration_s * terms.second_price * 3600
        paid = np.arange(len(saved)) * (terms.caches * terms.block_gb * terms.gb_price)
        return self.at(terms.gb_of(int(np.argmax(saved - paid))))
