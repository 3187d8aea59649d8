"""The tokens of an emulated model: drawn from a range by seed and position, as good as any others.

Says when a machine is too busy to keep the time of what it emulates.

The emulated engine: runs no model, but takes as long as a performance model says that one would.
"""

import logging
import math
from collections.abc import Iterable, Sequence

from twofold.cluster.timing import PS, Timing, squares_of
from twofold.engine.base import KvLayout, OnLayer, Sampled, SequenceStep
from twofold.engine.emulated.prefills import Clock, PrefillTimes
from twofold.request import SamplingParams
from twofold.scheduling.instance.swap_preemption import BlockCopy

_MASK = 2**64 - 1


class RandomTokens:
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


log = logging.getLogger(__name__)

_TOLERATED = PS // 20
_EVERY = 10 * PS


class LatenessMonitor:
    """How late batches end. Warns when it is much, and not more often than every ten seconds."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._said: int | None = None

    def note(self, now: int, due: int) -> None:
        """A batch that was to end at picosecond `due` has ended at `now`."""
        late = now - due
        if late > _TOLERATED and (self._said is None or now - self._said > _EVERY):
            self._said = now
            log.warning(
                "%s ended a batch %.0f ms late: this machine is too busy for all that it emulates",
                self._instance,
                late / PS * 1e3,
            )


_MOST_BEHIND = PS  # of work that a process that was stopped makes up for in a burst


class EmulatedEngine:
    """Implements `twofold.engine.base.Engine` with durations from `timing`, the simulator's own.

    Iterations that follow each other without a pause begin where the one before ended by the model, not where the
    process came round to it: neither late wake-ups nor the work between iterations add up. `rest` tells the
    engine of a pause; what comes after one begins when it comes.
    """

    def __init__(
        self,
        timing: Timing,
        layout: KvLayout,
        num_blocks: int,
        prefills: PrefillTimes,
        tokens: RandomTokens,
        clock: Clock,
        lateness: LatenessMonitor,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._timing, self._prefills, self._tokens = timing, prefills, tokens
        self._clock, self._lateness = clock, lateness
        self._busy_until: int | None = None

    def rest(self) -> None:
        """There is nothing to run: the worker waits."""
        self._busy_until = None

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Let the time pass that these blocks would take to the memory of the host, or from there."""
        end = self._begin() + self._timing.copying(copies)
        self._clock.sleep_until(end)
        self._busy_until = end

    def run(
        self,
        steps: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        wait_for: OnLayer | None = None,
    ) -> list[Sampled | None]:
        """Let the time of one iteration pass (see `Engine.run`)."""
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
        self._lateness.note(self._clock.now(), end)
        return sampled

    def _begin(self) -> int:
        now, after = self._clock.now(), self._busy_until
        return now if after is None or now - after > _MOST_BEHIND else after

    def _duration(self, prompts: Iterable[SequenceStep], decodes: Sequence[SequenceStep]) -> int:
        """Picoseconds; the decodes read the KV before their token, as in the simulator."""
        context = sum(step.start for step in decodes)
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
    """Whether it continues an output, rather than computing a prompt or a piece of one."""
    return step.output_index > 0 and len(step.token_ids) == 1
