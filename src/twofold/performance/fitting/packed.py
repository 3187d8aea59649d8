"""Fit `twofold.performance.host_profile` to measured iterations, and say how well it predicts those it did not see."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec
import numpy as np

from twofold.errors import ConfigurationError
from twofold.performance.fitting.fit import Floats, non_negative_least_squares
from twofold.performance.host_profile import BENDS, PackedTimes, spread

_GRAIN = 8  # iterations that differ by less than an eighth of an octave in what they read are repeats of one
_FEWEST = len(BENDS) + 4  # as many as there are coefficients
_FOLDS = 5
# What is off counts by its error, not by the square of it (least absolute deviations, by least squares weighted anew
# until they stand still): a worker that has just woken up takes twice as long, and says little about the others.
_REWEIGHTED, _CLOSE = 12, 0.02
KINDS = ("prefill", "decode", "mixed")


class MeasuredIteration(msgspec.Struct, frozen=True, kw_only=True):
    """A measured iteration: what was in it, as `PackedTimes.seconds` takes it, and how long it took."""

    tokens: int
    squares: int
    sequences: int
    context: int
    seconds: float

    @property
    def kind(self) -> str:
        if not self.sequences:
            return "prefill"
        return "mixed" if self.tokens else "decode"

    def predicted_s(self, times: PackedTimes) -> float:
        """What the times say that it takes, of a worker that had just run another."""
        return times.seconds(self.tokens, self.squares, self.sequences, self.context)


def fit_packed(iterations: Iterable[MeasuredIteration]) -> PackedTimes:
    """The times that come nearest, relatively, to the medians of iterations that are repeats of each other.

    Raises ConfigurationError where there are too few different ones.
    """
    cells = median_iterations(iterations)
    if len(cells) < _FEWEST:
        raise ConfigurationError(
            f"{len(cells)} kinds of iterations were measured, and a fit needs {_FEWEST} that differ"
        )
    return msgspec.structs.replace(_fit(cells), iterations=len(cells), **_held_out(cells))


def median_iterations(iterations: Iterable[MeasuredIteration]) -> list[MeasuredIteration]:
    """One for each group of nearly alike iterations: its medians, so that one that was held up counts for nothing."""
    groups: dict[tuple[int, ...], list[MeasuredIteration]] = defaultdict(list)
    for one in iterations:
        groups[_grain(one.tokens), _grain(one.squares), one.sequences, _grain(one.context)].append(one)
    return [_median(groups[key]) for key in sorted(groups)]


def _grain(value: int) -> int:
    return round(math.log2(value + 1) * _GRAIN)


def _median(group: Sequence[MeasuredIteration]) -> MeasuredIteration:
    return MeasuredIteration(
        tokens=round(median(one.tokens for one in group)),
        squares=round(median(one.squares for one in group)),
        sequences=group[0].sequences,
        context=round(median(one.context for one in group)),
        seconds=median(one.seconds for one in group),
    )


def _fit(cells: Sequence[MeasuredIteration]) -> PackedTimes:
    rows = [
        [1.0, *spread(one.tokens + one.sequences), one.squares, one.sequences, one.context] for one in cells
    ]
    columns: list[Floats] = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    seconds = np.array([one.seconds for one in cells], dtype=np.float64)
    rate, scale = np.zeros(len(columns)), seconds
    for _ in range(_REWEIGHTED):
        rate = non_negative_least_squares(columns, seconds, scale)
        errors = np.abs(np.column_stack(columns) @ rate / seconds - 1.0)
        scale = seconds * np.sqrt(np.maximum(errors, _CLOSE) / _CLOSE)
    base_s, *token_s, square_s, sequence_s, context_s = rate.tolist()
    return PackedTimes(
        base_s=base_s,
        token_s=tuple(token_s),
        square_s=square_s,
        sequence_s=sequence_s,
        context_s=context_s,
    )


def _held_out(cells: Sequence[MeasuredIteration]) -> dict[str, float | None]:
    """The mean error of each kind, every cell predicted by a fit to the others' folds; None for a kind that was not
    measured."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for fold in range(_FOLDS):
        seen = [one for index, one in enumerate(cells) if index % _FOLDS != fold]
        times = _fit(seen)
        for one in cells[fold::_FOLDS]:
            predicted = one.predicted_s(times)
            errors[one.kind].append(abs(predicted / one.seconds - 1))
    return {f"{kind}_error": fmean(found) if found else None for kind, found in errors.items()}
