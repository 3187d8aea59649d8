"""The emulated engine: it sleeps for the time that a performance model predicts, and computes nothing."""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from twofold.cluster.timing import PS, Timing, squares_of
from twofold.engine.base import KvLayout, LayerShape, OnLayer, Sampled, SequenceStep
from twofold.request import SamplingParams
from twofold.scheduling.instance.swap_preemption import BlockCopy

log = logging.getLogger(__name__)

_MASK = 2**64 - 1
_MAX_DELAY_PS = PS // 20  # maximum delay of the end of a batch without a warning
_WARNING_INTERVAL_PS = 10 * PS
_MAX_LAG_PS = PS  # maximum lag that the engine makes up for, for example after the process was stopped
_MAX_GROUP = 8  # layers


class MonotonicClock:
    """The host's monotonic clock, in picoseconds."""

    def now(self) -> int:
        return time.monotonic_ns() * (PS // 10**9)

    def sleep_until(self, moment: int) -> None:
        while (left := moment - self.now()) > 0:
            time.sleep(left / PS)


class LayerGroups:
    """Groups of layers that the emulated engine reports as complete together, to save thread wake-ups."""

    def __init__(self, layers: int) -> None:
        # A hand-off starts after the first layer and ends after the last layer, so these are groups of their own.
        ends, end, size = [], 0, 1
        while end < layers:
            end += size
            ends.append(end)
            left = layers - end
            size = min(size * 2, _MAX_GROUP, max(1, (left + 1) // 2))
        self.ends = tuple(ends)  # for each group, the index after its last layer
        self.layers = layers

    def __len__(self) -> int:
        return len(self.ends)

    def ready(self, group: int, begin: int, end: int) -> int:
        """Return the completion time of a group of layers in a prefill that lasts from `begin` to `end`."""
        return begin + (end - begin) * self.ends[group] // self.layers

    def layout(self, kv_bytes_per_token: int, block_size: int) -> KvLayout:
        """Return a KV cache layout in which each group of layers counts as one layer."""
        bounds = [kv_bytes_per_token * end // self.layers for end in (0, *self.ends)]
        shapes = [LayerShape(1, high - low, 0) for low, high in pairwise(bounds)]
        return KvLayout(tuple(shapes), block_size, dtype="emulated", itemsize=1)


class PrefillTimes:
    """Start and end times of prefills, which determine when an emulated hand-off can send a layer."""

    def __init__(self, groups: LayerGroups) -> None:
        self.groups = groups
        # By last block of the prompt, which no other prompt gets before the hand-off ends.
        self._spans: dict[int, tuple[int, int]] = {}

    def note(self, block_tables: Iterable[Sequence[int]], begin: int, end: int) -> None:
        """Record that the prefills of the prompts in `block_tables` run from `begin` to `end`, in picoseconds."""
        for blocks in block_tables:
            self._spans[blocks[-1]] = begin, end

    def ready(self, blocks: Sequence[int], group: int) -> int:
        """Return the time at which the prefill of a prompt completes a group of layers."""
        return self.groups.ready(group, *self._spans[blocks[-1]])

    def end(self, blocks: Sequence[int]) -> int:
        """Return the end time, in picoseconds, of the prefill that writes the KV blocks `blocks`."""
        return self._spans[blocks[-1]][1]


class RandomTokens:
    """Generator of random token ids, in place of a model's output."""

    def __init__(self, vocab_size: int) -> None:
        self.low = min(256, vocab_size // 2)  # above most special tokens
        self.size = vocab_size - self.low

    def sample(self, sampling: SamplingParams, position: int, output_index: int) -> Sampled:
        """Return a token that depends only on the seed and the position."""
        place = _mix(0 if sampling.greedy else sampling.seed, position) % self.size
        ruled_out = _as_set(sampling.stop_token_ids if output_index < sampling.min_tokens else ())
        places = (place + step for step in range(len(ruled_out) + 1))
        tokens = (self.low + at % self.size for at in places)
        token = next((each for each in tokens if each not in ruled_out), self.low + place)
        if sampling.logprobs is None:
            return Sampled(token)
        steps, alike = range(min(sampling.logprobs, self.size)), -math.log(self.size)
        return Sampled(token, alike, tuple((self.low + (token - self.low + step) % self.size, alike) for step in steps))


@lru_cache(maxsize=256)
def _as_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the set of token ids, which is made once for all tokens of a request."""
    return frozenset(token_ids)


def _mix(seed: int, position: int) -> int:
    """Return the SplitMix64 hash of `seed` and `position` (Steele, Lea and Flood, OOPSLA'14)."""
    state = 0
    for word in (seed, position):
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class EmulatedEngine:
    """Engine that sleeps for the predicted time of each iteration instead of computing."""

    def __init__(
        self,
        timing: Timing,
        layout: KvLayout,
        num_blocks: int,
        prefills: PrefillTimes,
        tokens: RandomTokens,
        clock: MonotonicClock,
        instance: str,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._timing, self._prefills, self._tokens = timing, prefills, tokens
        self._clock, self._instance = clock, instance
        self._busy_until: int | None = None
        self._warned: int | None = None

    def pause(self) -> None:
        """Let the next iteration start at the next call of `run`, not at the end of the previous iteration."""
        self._busy_until = None

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Sleep for the predicted time of copying blocks to or from swap space."""
        end = self._begin() + self._timing.copying(copies)
        self._clock.sleep_until(end)
        self._busy_until = end

    def run(
        self, steps: Sequence[SequenceStep], on_layer: OnLayer | None = None, wait_for: OnLayer | None = None
    ) -> list[Sampled | None]:
        """Sleep for the predicted time of one iteration, and return random tokens (see `Engine.run`)."""
        if not steps:
            return []
        begin = self._begin()
        prompts = [step for step in steps if not _decodes(step)]
        end = begin + self._duration(prompts, [step for step in steps if _decodes(step)])
        self._prefills.note((step.block_table for step in prompts), begin, end)
        if on_layer is not None or wait_for is not None:
            for group in range(len(self._prefills.groups)):
                self._clock.sleep_until(self._prefills.groups.ready(group, begin, end))
                for told in (wait_for, on_layer):
                    if told is not None:
                        told(group)
        sampled = [self._sample(step) for step in steps]
        self._clock.sleep_until(end)
        self._busy_until = end
        self._check_delay(end)
        return sampled

    def _check_delay(self, due: int) -> None:
        """Log a warning if a batch ends much later than predicted."""
        now = self._clock.now()
        if now - due > _MAX_DELAY_PS and (self._warned is None or now - self._warned > _WARNING_INTERVAL_PS):
            self._warned = now
            late_ms = (now - due) / PS * 1e3
            log.warning(
                "%s ended a batch %.0f ms late: this host is too slow for the emulated service", self._instance, late_ms
            )

    def _begin(self) -> int:
        # Iterations start at the predicted end of the previous one, so that delays of the host do not add up.
        now, after = self._clock.now(), self._busy_until
        return now if after is None or now - after > _MAX_LAG_PS else after

    def _duration(self, prompts: Iterable[SequenceStep], decodes: Sequence[SequenceStep]) -> int:
        """Return the duration of an iteration in picoseconds."""
        context = sum(step.start for step in decodes)  # without the new tokens
        tokens = squares = 0
        for step in prompts:
            tokens += len(step.token_ids)
            squares += squares_of(len(step.token_ids), step.start)
        if tokens:
            return self._timing.prompts(tokens, squares, len(decodes), context).first_ps
        return self._timing.decodes(len(decodes), context).first_ps

    def _sample(self, step: SequenceStep) -> Sampled | None:
        if step.sampling is None:
            return None
        return self._tokens.sample(step.sampling, step.start + len(step.token_ids), step.output_index)


def _decodes(step: SequenceStep) -> bool:
    """Return whether the step is a decode, not a prompt chunk."""
    return step.output_index > 0 and len(step.token_ids) == 1
