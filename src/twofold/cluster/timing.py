"""Durations and power of iterations as exact integers, in picoseconds and milliwatts."""

from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.performance.base import PerformanceModel
from twofold.scheduling.instance.queues import RunningBatch
from twofold.scheduling.instance.swap_preemption import BlockCopy

PS: Final = 10**12  # picoseconds in a second

_PS: Final = 1e12
# A float from here on has no fraction: adding it rounds to the nearest integer, halves to even, as `round` does.
_INTEGERS: Final = 4503599627370496.0  # 2⁵²
_HALF: Final = 30
_LOW: Final = (1 << _HALF) - 1
_MAX_PROMPT_TIMINGS: Final = 1 << 16


def nearest(number: float) -> int:
    """Round a number to the nearest integer, like the built-in `round` but faster."""
    return int(number + _INTEGERS - _INTEGERS) if 0.0 <= number < _INTEGERS else round(number)


def ps(seconds: float) -> int:
    """Convert seconds to whole picoseconds."""
    return nearest(seconds * _PS)


def product(large: int, small: int) -> int:
    """Return the product of two non-negative integers; when compiled by mypyc, faster than `*`."""
    return ((large >> _HALF) * small << _HALF) + (large & _LOW) * small


def squares_of(tokens: int, context: int) -> int:
    """Return (context + tokens)² − context², a measure of the attention cost of a prompt chunk."""
    return tokens * (tokens + 2 * context)


@mypyc_attr(acyclic=True, free_list_len=1)
class RunTiming:
    """Durations of a batch's successive iterations in picoseconds, and power in milliwatts."""

    __slots__ = ("first_ps", "milliwatts", "step_ps")

    def __init__(self, first_ps: int, step_ps: int, milliwatts: int) -> None:
        self.first_ps = first_ps  # of the first iteration
        self.step_ps = step_ps  # more for each next iteration
        self.milliwatts = milliwatts

    def end_ps(self, iterations: int) -> int:
        """Return the total time of the first `iterations` iterations, in picoseconds."""
        if iterations == 1:
            return self.first_ps
        end = product(self.first_ps, iterations)
        return end + product(iterations * (iterations - 1) // 2, self.step_ps) if self.step_ps else end

    def under_way(self, elapsed_ps: int) -> int:
        """Return the 1-based index of the iteration in progress after `elapsed_ps` picoseconds."""
        if not self.step_ps:
            return elapsed_ps // self.first_ps + 1
        # Solve the series for the count: estimate in floats, then correct in integers.
        half = self.first_ps / self.step_ps - 0.5
        count = int((half * half + 2.0 * elapsed_ps / self.step_ps) ** 0.5 - half)
        while count > 0 and self.end_ps(count) > elapsed_ps:
            count -= 1
        while self.end_ps(count + 1) <= elapsed_ps:
            count += 1
        return count + 1


class Timing:
    """Computes the duration and the power of batches with a performance model."""

    def __init__(self, model: PerformanceModel, copy_ps: int = 0) -> None:
        self.model = model
        self._copy_ps = copy_ps  # to copy a block to host memory or back
        self.idle_mw = nearest(model.idle_w * 1e3)
        # By number of sequences: timing without context, and picoseconds per context token.
        self._decodes: dict[int, tuple[RunTiming, int]] = {}
        self._prompts: dict[int, RunTiming] = {}
        self._stages: tuple[Timing, Timing] | None = None

    def stages(self) -> "tuple[Timing, Timing]":
        """Return a `Timing` for the first pipeline stage, and a `Timing` shared by all later stages."""
        if self._stages is None:
            self._stages = Timing(self.model.first_stage), Timing(self.model.later_stage)
        return self._stages

    def batch(self, batch: RunningBatch) -> RunTiming:
        """Return a batch's predicted iteration times (picoseconds) and power (milliwatts)."""
        sequences, context = batch.decode_sequences, batch.context_tokens
        if batch.prefills:
            squares = 0
            for chunk in batch.prefills:
                squares += squares_of(chunk.num_tokens, chunk.context_tokens)
            return self.prompts(batch.prefill_tokens, squares, sequences, context)
        return self.decodes(sequences, context)

    def copying(self, copies: Sequence[BlockCopy]) -> int:
        """Return the time of block copies to or from swap space, in picoseconds."""
        blocks = 0
        for copy in copies:
            blocks += copy.blocks
        return blocks * self._copy_ps

    def decodes(self, sequences: int, context: int) -> RunTiming:
        """Return the timing of a decode batch of size `sequences`, with `context` KV tokens in total."""
        known = self._decodes.get(sequences)
        if known is None:
            cost, watts = self.model.decode_cost(sequences), self.model.decode_w(sequences)
            base = RunTiming(max(1, ps(cost.base_s)), 0, nearest(watts * 1e3))
            # Rounded here, so that many iterations at once take exactly as long as one by one.
            known = self._decodes[sequences] = base, ps(cost.context_s)
        without_context, per_token = known
        if not per_token:
            return without_context
        first = without_context.first_ps + per_token * context
        return RunTiming(first, per_token * sequences, without_context.milliwatts)

    def prompts(self, tokens: int, squares: int, sequences: int, context: int) -> RunTiming:
        """Return the timing of a batch of prompt chunks and `sequences` decodes."""
        if sequences:
            seconds = self.model.mixed_s(tokens, squares, sequences, context)
            return RunTiming(max(1, ps(seconds)), 0, nearest(self.model.prefill_w(tokens) * 1e3))
        known = self._prompts.get((squares << 24) + tokens)
        if known is None:
            if len(self._prompts) > _MAX_PROMPT_TIMINGS:
                self._prompts.clear()
            seconds, watts = self.model.prefill_s(tokens, squares), self.model.prefill_w(tokens)
            known = RunTiming(max(1, ps(seconds)), 0, nearest(watts * 1e3))
            self._prompts[(squares << 24) + tokens] = known
        return known
