"""LRU stack distances: what a cache of every size would hit, from one pass over a trace.

A cache that evicts the least recently used block holds, at any size, the blocks that were used last: a larger one has
all that a smaller one has (Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 1970). So
each use of a block has a least capacity at which it is a hit, and these are all there is to know. Where tiers hand down
what they evict and bring up what is used, the first has the top of the same stack and the next ones what follows.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from twofold.request import BlockKey

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
