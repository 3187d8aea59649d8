"""Fit the iteration times of a host profile (`PackedTimes`) to measured iterations, with cross-validation."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec
import numpy as np

from twofold.errors import ConfigurationError
from twofold.performance.fitting.fit import Floats, non_negative_least_squares
from twofold.performance.host_profile import BENDS, PackedTimes, spread

_GRAIN = 8  # iterations within an eighth of an octave count as repeats
_FEWEST = len(BENDS) + 4  # the number of coefficients
_FOLDS = 5
# Least absolute deviations by iteratively reweighted least squares: an iteration after a pause takes twice as long and
# would dominate squared errors.
_REWEIGHTED, _CLOSE = 12, 0.02
KINDS = ("prefill", "decode", "mixed")


class MeasuredIteration(msgspec.Struct, frozen=True, kw_only=True):
    """A measured iteration: its contents, as arguments of `PackedTimes.seconds`, and its duration in seconds."""

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
        """Return the duration that `times` predicts for a worker that was not idle before the iteration."""
        return times.seconds(self.tokens, self.squares, self.sequences, self.context)


def fit_packed(iterations: Iterable[MeasuredIteration]) -> PackedTimes:
    """Fit `PackedTimes` to medians of groups of similar iterations. Raises ConfigurationError for too few groups."""
    cells = median_iterations(iterations)
    if len(cells) < _FEWEST:
        raise ConfigurationError(f"a fit needs {_FEWEST} distinct iterations, but only {len(cells)} were measured")
    return msgspec.structs.replace(_fit(cells), iterations=len(cells), **_held_out(cells))


def median_iterations(iterations: Iterable[MeasuredIteration]) -> list[MeasuredIteration]:
    """Group similar iterations and return the median of each group, which is robust to outliers."""
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
    rows = [[1.0, *spread(one.tokens + one.sequences), one.squares, one.sequences, one.context] for one in cells]
    columns: list[Floats] = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    seconds = np.array([one.seconds for one in cells], dtype=np.float64)
    rate, scale = np.zeros(len(columns)), seconds
    for _ in range(_REWEIGHTED):
        rate = non_negative_least_squares(columns, seconds, scale)
        errors = np.abs(np.column_stack(columns) @ rate / seconds - 1.0)
        scale = seconds * np.sqrt(np.maximum(errors, _CLOSE) / _CLOSE)
    base_s, *token_s, square_s, sequence_s, context_s = rate.tolist()
    return PackedTimes(
        base_s=base_s, token_s=tuple(token_s), square_s=square_s, sequence_s=sequence_s, context_s=context_s
    )


def _held_out(cells: Sequence[MeasuredIteration]) -> dict[str, float | None]:
    """Return the mean cross-validation error of each kind of iteration; None for a kind without measurements."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for fold in range(_FOLDS):
        seen = [one for index, one in enumerate(cells) if index % _FOLDS != fold]
        times = _fit(seen)
        for one in cells[fold::_FOLDS]:
            predicted = one.predicted_s(times)
            errors[one.kind].append(abs(predicted / one.seconds - 1))
    return {f"{kind}_error": fmean(found) if found else None for kind, found in errors.items()}
