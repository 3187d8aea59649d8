"""Hit rate of a cache tier and accelerator time saved by hits, at every capacity of the tier.

A hit in an LRU cache is also a hit in every larger LRU cache (Mattson et al., Evaluation techniques for
storage hierarchies, IBM Systems Journal 1970).
"""

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from twofold.performance.base import PerformanceModel
from twofold.performance.reuse import reuse_s
from twofold.request import BlockKey
from twofold.workload.blocks import BLOCK_TOKENS

Blocks = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


def least_capacities(prompts: Sequence[Sequence[BlockKey]]) -> Blocks:
    """For each block of each prompt, return the smallest LRU cache capacity at which the block is a hit.

    Capacities are in blocks. For a block that is never a hit, the capacity is the largest 64-bit integer.
    """
    # The result is approximate for caches smaller than a prompt.
    keys = list(chain.from_iterable(prompts))
    distances = np.minimum(stack_distances(keys), len(keys) + 1)
    # A block hits only if all earlier blocks of its prompt hit, hence the running maximum within each prompt: later
    # prompts are lifted above all earlier ones.
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    lift = np.repeat(np.arange(len(prompts)), lengths) * (len(keys) + 2)
    least = np.maximum.accumulate(distances + lift) - lift
    return np.where(least > len(keys), NEVER, least)


def stack_distances(keys: Sequence[BlockKey]) -> Blocks:
    """For each use of a key, return the smallest LRU capacity at which it hits, or NEVER for the first use."""
    previous = _previous(keys)
    again = np.flatnonzero(previous >= 0)
    last = previous[again]
    # Keys between the two uses of a key; repeated ones count once.
    distances = np.full(len(keys), NEVER)
    distances[again] = again - last - _greater_before(last)
    return distances


def _previous(keys: Sequence[BlockKey]) -> Blocks:
    """For each key in `keys`, return the index of its previous occurrence, or −1 for the first occurrence."""
    latest: dict[BlockKey, int] = {}
    previous = []
    for place, key in enumerate(keys):
        previous.append(latest.get(key, -1))
        latest[key] = place
    return np.array(previous, dtype=np.int64)


def _greater_before(values: Blocks) -> Blocks:
    """Return, for each value, the number of greater values before it."""
    # For distinct values of at least 0, in O(n log n) time. From the highest to the lowest bit, values that agree in
    # all higher bits form a group: a value with a 0 in this bit is smaller than all values of its group with a 1.
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
    """Return the prefill seconds saved by each cached block of a prefix, given the seconds to load each block."""
    whole_s = model.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
    most_s = load_s = 0.0
    gains = []
    for number, block_s in enumerate(loads_s, start=1):
        load_s += block_s
        # The last token is always computed. Loads overlap with computing the rest of the prompt.
        reused = min(number * BLOCK_TOKENS, prompt_tokens - 1)
        # A block that loads more slowly than it is computed saves nothing.
        saved_s = max(most_s, whole_s - reuse_s(model, prompt_tokens, reused, load_s))
        gains.append(saved_s - most_s)
        most_s = saved_s
    return gains


Seconds = npt.NDArray[np.float64]
_ROUNDING = 1e-6  # of a block, so that converting blocks to GB and back is exact


class CapacityTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Conversion of cache blocks to GB, and of saved prefill time to saved accelerators and dollars."""

    caches: int  # equal caches of the tier: one per node, or one for all nodes
    nodes: int
    blocks: int  # of the trace
    block_gb: float
    duration_s: float  # of the trace
    accelerators: int  # per instance
    second_price: float  # of an instance, in dollars
    gb_price: float  # of the tier, in dollars per hour

    def blocks_of(self, gb_per_node: float) -> int:
        """Convert the capacity per node in GB to the capacity of one cache in blocks."""
        return int(gb_per_node * self.nodes / self.caches / self.block_gb + _ROUNDING)

    def gb_of(self, blocks: int) -> float:
        """Return the GB that a cache tier needs on each node if every cache of the tier holds `blocks` blocks."""
        return blocks * self.block_gb * self.caches / self.nodes


class CapacityPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate, savings and price of a cache tier at one capacity."""

    gb_per_node: float
    hit_rate: float  # share of the trace's blocks found in this or a higher tier
    accelerators: float  # freed on average by hits in this tier
    saved_per_h: float  # price of the freed accelerators, in dollars
    price_per_h: float  # of the tier, in dollars

    @property
    def gain_per_h(self) -> float:
        """Net savings in dollars per hour: price of the freed accelerators minus price of the cache tier."""
        return self.saved_per_h - self.price_per_h


class CapacityCurve:
    """Hit rate, savings and price of a cache tier at every capacity."""

    def __init__(self, terms: CapacityTerms, least: Blocks, saved_s: Seconds) -> None:
        # `least` is in blocks of this tier: 0 if a higher tier holds the block. `saved_s` is instance time per hit.
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
        """Return the hit rate, savings and price of the cache tier at `gb_per_node` GB per node."""
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
        """Return the hit rate, savings and price of the cache tier at the capacity with the highest net savings."""
        terms = self.terms
        saved = self._saved_s / terms.duration_s * terms.second_price * 3600
        paid = np.arange(len(saved)) * (terms.caches * terms.block_gb * terms.gb_price)
        return self.at(terms.gb_of(int(np.argmax(saved - paid))))
