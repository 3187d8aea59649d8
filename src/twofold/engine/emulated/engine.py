"""The emulated engine: runs no model, but takes as long as a performance model says that one would."""

from collections.abc import Iterable, Sequence

from twofold.engine.base import KvLayout, OnLayer, Sampled, SequenceStep
from twofold.engine.emulated.clock import Clock
from twofold.engine.emulated.lateness import Lateness
from twofold.engine.emulated.prefills import Prefills
from twofold.engine.emulated.tokens import TokenRange
from twofold.scheduling.growth import Copy
from twofold.simulation.kernel import PS
from twofold.simulation.timing import Timing, squares_of

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
        prefills: Prefills,
        tokens: TokenRange,
        clock: Clock,
        lateness: Lateness,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._timing, self._prefills, self._tokens = timing, prefills, tokens
        self._clock, self._lateness = clock, lateness
        self._busy_until: int | None = None

    def rest(self) -> None:
        """There is nothing to run: the worker waits."""
        self._busy_until = None

    def copy(self, copies: Sequence[Copy]) -> None:
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
