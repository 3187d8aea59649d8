"""Products of large integers.

Durations and power of iterations in whole picoseconds and milliwatts, from a performance model.
"""

from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.performance.base import PerformanceModel
from twofold.scheduling.instance.batch import RunningBatch
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.simulation.kernel import nearest, ps

_HALF: Final = 30
_LOW: Final = (1 << _HALF) - 1


def product(large: int, small: int) -> int:
    """`large * small`, both ≥ 0, exactly.

    Compiled code multiplies at the speed of the machine as long as both factors are below 2³⁰, which picoseconds
    are not: so they are taken in two halves.
    """
    return ((large >> _HALF) * small << _HALF) + (large & _LOW) * small


_MANY: Final = 1 << 16  # kinds of prompts whose times are kept


@mypyc_attr(acyclic=True, free_list_len=1)
class RunTiming:
    """How iterations of one batch follow each other: the first takes `first_ps`, each later one `step_ps` more."""

    __slots__ = ("first_ps", "milliwatts", "step_ps")

    def __init__(self, first_ps: int, step_ps: int, milliwatts: int) -> None:
        self.first_ps = first_ps
        self.step_ps = step_ps
        self.milliwatts = milliwatts

    def end_ps(self, iterations: int) -> int:
        """Picoseconds until the end of that many (an arithmetic series)."""
        if iterations == 1:
            return self.first_ps
        end = product(self.first_ps, iterations)
        return end + product(iterations * (iterations - 1) // 2, self.step_ps) if self.step_ps else end

    def under_way(self, elapsed_ps: int) -> int:
        """Which iteration runs after `elapsed_ps`, counted from 1; one that ends just then is over."""
        if not self.step_ps:
            return elapsed_ps // self.first_ps + 1
        # Solves the series for the count; floats come close, integers decide.
        half = self.first_ps / self.step_ps - 0.5
        count = int((half * half + 2.0 * elapsed_ps / self.step_ps) ** 0.5 - half)
        while count > 0 and self.end_ps(count) > elapsed_ps:
            count -= 1
        while self.end_ps(count + 1) <= elapsed_ps:
            count += 1
        return count + 1


class Timing:
    """The pace of every kind of iteration; one serves all instances of the same kind.

    What is asked of the performance model once per number of sequences is kept, in integers: the duration of an
    iteration is then the same whether it is asked for alone or as the last of a run. `copy_ps` is what a block takes to
    the memory of the host, or from there.
    """

    def __init__(self, model: PerformanceModel, copy_ps: int = 0) -> None:
        self.model = model
        self._copy_ps = copy_ps
        self.idle_mw = nearest(model.idle_w * 1e3)
        # By number of sequences, as if they read nothing, and what each token that they read takes.
        self._decodes: dict[int, tuple[RunTiming, int]] = {}
        self._prompts: dict[int, RunTiming] = {}
        self._stages: tuple[Timing, Timing] | None = None

    def stages(self) -> "tuple[Timing, Timing]":
        """Of the first stage of a pipeline, and of each of the others."""
        if self._stages is None:
            self._stages = Timing(self.model.first_stage), Timing(self.model.later_stage)
        return self._stages

    def pace(self, iteration: RunningBatch) -> RunTiming:
        sequences, context = iteration.decode_sequences, iteration.context_tokens
        if iteration.prefills:
            return self.prompts(iteration.prefill_tokens, _squares(iteration), sequences, context)
        return self.decodes(sequences, context)

    def after(self, copies: Sequence[BlockCopy], pace: RunTiming) -> RunTiming:
        """The same iterations when these blocks are copied before the first of them."""
        if not copies:
            return pace
        return RunTiming(pace.first_ps + self.copying(copies), pace.step_ps, pace.milliwatts)

    def copying(self, copies: Sequence[BlockCopy]) -> int:
        """Picoseconds of copies, one after the other."""
        blocks = 0
        for copy in copies:
            blocks += copy.blocks
        return blocks * self._copy_ps

    def decodes(self, sequences: int, context: int) -> RunTiming:
        """Of iterations in which `sequences` sequences, with `context` KV tokens in all, make a token each."""
        known = self._decodes.get(sequences)
        if known is None:
            known = self._decodes[sequences] = self._decode(sequences)
        reading_nothing, per_token = known
        if not per_token:
            return reading_nothing
        first = reading_nothing.first_ps + per_token * context
        return RunTiming(first, per_token * sequences, reading_nothing.milliwatts)

    def _decode(self, sequences: int) -> tuple[RunTiming, int]:
        cost, watts = self.model.decode_cost(sequences), self.model.decode_w(sequences)
        return RunTiming(max(1, ps(cost.base_s)), 0, nearest(watts * 1e3)), ps(cost.context_s)

    def prompts(self, tokens: int, squares: int, sequences: int, context: int) -> RunTiming:
        """Of an iteration with prompts in it, beside `sequences` decodes; see `PerformanceModel.mixed_s`."""
        if sequences:
            seconds = self.model.mixed_s(tokens, squares, sequences, context)
            return RunTiming(max(1, ps(seconds)), 0, nearest(self.model.prefill_w(tokens) * 1e3))
        known = self._prompts.get((squares << 24) + tokens)
        if known is None:
            if len(self._prompts) > _MANY:
                self._prompts.clear()
            seconds, watts = self.model.prefill_s(tokens, squares), self.model.prefill_w(tokens)
            known = self._prompts[(squares << 24) + tokens] = RunTiming(
                max(1, ps(seconds)), 0, nearest(watts * 1e3)
            )
        return known


def squares_of(tokens: int, context: int) -> int:
    """(context + tokens)² − context²: what attention within a prompt, or a piece of it, costs."""
    return tokens * (tokens + 2 * context)


def _squares(iteration: RunningBatch) -> int:
    """Σ((context + tokens)² − context²): what attention within the prompts costs."""
    squares = 0
    for part in iteration.prefills:
        squares += squares_of(part.num_tokens, part.context_tokens)
    return squares
