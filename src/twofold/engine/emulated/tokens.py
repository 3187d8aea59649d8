"""The tokens of an emulated model: drawn from a range by seed and position, as good as any others."""

import math

from twofold.engine.base import Sampled
from twofold.request import SamplingParams

_MASK = 2**64 - 1


class TokenRange:
    """The ids from `low` up to, not including, `vocab_size`, all equally likely; none of them ends an output.

    The lowest ids are left out: that is where vocabularies keep their special tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self.low = min(256, vocab_size // 2)
        self.size = vocab_size - self.low

    def sample(self, sampling: SamplingParams, position: int, output_index: int) -> Sampled:
        """The token at `position` of a sequence: a function of seed and position, and greedily of position alone."""
        place = _mix(0 if sampling.greedy else sampling.seed, position) % self.size
        ruled_out = frozenset(sampling.stop_token_ids if output_index < sampling.min_tokens else ())
        places = (place + step for step in range(len(ruled_out) + 1))
        tokens = (self.low + at % self.size for at in places)
        token = next((each for each in tokens if each not in ruled_out), self.low + place)
        if sampling.logprobs is None:
            return Sampled(token)
        return Sampled(token, -math.log(self.size), self._alternatives(token, sampling.logprobs))

    def _alternatives(self, token: int, count: int) -> tuple[tuple[int, float], ...]:
        """The token itself and its successors: the best there are, as all are equally likely."""
        ids = (self.low + (token - self.low + step) % self.size for step in range(min(count, self.size)))
        return tuple((each, -math.log(self.size)) for each in ids)


def _mix(seed: int, position: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA'14), keyed twice."""
    state = 0
    for word in (seed, position):
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state
