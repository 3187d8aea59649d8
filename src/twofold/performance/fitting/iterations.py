"""Fit `IterationTimes` to measured iterations."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, NamedTuple

import msgspec
import numpy as np

from twofold.errors import ConfigurationError
from twofold.performance.fitting.fit import Floats, non_negative_least_squares
from twofold.performance.profile import IterationTimes, spread

_GRAIN: Final = 8  # measurements within an eighth of an octave count as repeats
FEWEST: Final = 11  # distinct measurements that a fit needs
_FOLDS: Final = 5
# Least absolute deviations by iteratively reweighted least squares: an iteration after a pause takes twice as long and
# would dominate squared errors.
_REWEIGHTED, _CLOSE = 12, 0.02
_BENDS: Final = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LARGE: Final = (8, 16, 32, 64, 128, 256)
_MOST_BENDS: Final = 7
_LEAST_S: Final = 1e-6  # of an iteration: a fit can give all the time of prompts to `request_s`
KINDS: Final = ("prefill", "decode", "mixed")


class IterationWork(NamedTuple):
    """Prompt tokens, decodes and context of an iteration: the arguments of `IterationTimes.seconds`."""

    tokens: int
    squares: int = 0
    sequences: int = 0
    context: int = 0


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Measured total duration of successive iterations."""

    work: tuple[IterationWork, ...]
    seconds: float
    requests: int = 0  # each adds a fixed time outside the engine

    @property
    def tokens(self) -> int:
        """Number of prompt tokens in all iterations together."""
        return sum(each.tokens for each in self.work)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, or of a prompt with as much attention work as several prompts."""
        return math.isqrt(sum(each.squares for each in self.work))

    @property
    def kind(self) -> str:
        if not self.tokens:
            return "decode"
        return "mixed" if any(each.sequences for each in self.work) else "prefill"

    def predicted_s(self, times: IterationTimes, request_s: float = 0.0) -> float:
        """Return the predicted total seconds of the iterations."""
        # Without the extra time of a cold start.
        return sum(times.seconds(*each) for each in self.work) + request_s * self.requests


class FittedTimes(NamedTuple):
    """Fitted iteration times, and the seconds that each request takes outside the engine."""

    times: IterationTimes
    request_s: float


def fit_iterations(measurements: Iterable[Measurement]) -> FittedTimes:
    """Fit iteration times to measurements; similar ones count as one. Raises ConfigurationError for too few."""
    cells = median_measurements(measurements)
    if len(cells) < FEWEST:
        raise ConfigurationError(f"a fit needs {FEWEST} distinct measurements, but only {len(cells)} were made")
    found = _fit(cells)
    errors = {f"{kind}_error": error for kind, error in held_out_errors(cells).items()}
    times = msgspec.structs.replace(
        found.times,
        iterations=len(cells),
        max_prompt_tokens=max(one.prompt_tokens for one in cells),
        max_sequences=max(each.sequences for one in cells for each in one.work),
        **errors,
    )
    return found._replace(times=times)


def held_out_errors(cells: Sequence[Measurement]) -> dict[str, float | None]:
    """Map each kind of measurement (prefill, decode, mixed) to its median error in a cross-validation."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for fold in range(_FOLDS):
        seen = _fit([one for index, one in enumerate(cells) if index % _FOLDS != fold])
        for one in cells[fold::_FOLDS]:
            errors[one.kind].append(abs(one.predicted_s(*seen) / one.seconds - 1))
    return {kind: float(f"{median(found):.3g}") if found else None for kind, found in errors.items()}


def median_measurements(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Group similar measurements, and return the median of each group."""
    groups: dict[tuple[int, ...], list[Measurement]] = defaultdict(list)
    for one in measurements:
        grains = (part for each in one.work for part in (_grain(each.tokens), each.sequences, _grain(each.context)))
        groups[one.requests, *grains].append(one)
    return [_median(groups[key]) for key in sorted(groups)]


def _grain(value: int) -> int:
    return round(math.log2(value + 1) * _GRAIN)


def _median(group: Sequence[Measurement]) -> Measurement:
    work = zip(*(one.work for one in group), strict=True)
    return Measurement(
        work=tuple(IterationWork(*(round(median(part)) for part in zip(*each, strict=True))) for each in work),
        seconds=median(one.seconds for one in group),
        requests=group[0].requests,
    )


class _Shape(NamedTuple):
    """Breakpoints of a piecewise linear function for the iteration time.

    `bends` are numbers of batched tokens. `large` is a number of decode sequences, or 0 for none.
    """

    bends: tuple[int, ...]
    large: int  # the knee, in decodes; 0: none


def _fit(cells: Sequence[Measurement]) -> FittedTimes:
    """Fit a piecewise linear iteration time, with breakpoints chosen by the Bayesian information criterion."""
    sizes = sorted({each.tokens + each.sequences for one in cells for each in one.work})
    bends = [bend for bend in _BENDS if sizes[0] < bend < sizes[-1]]
    large = [0, *(knee for knee in _LARGE if knee < max(each.sequences for one in cells for each in one.work))]
    shape, least = _Shape((0,), 0), math.inf
    while True:  # adds a bend or a knee at a time
        more = [bend for bend in bends if bend not in shape.bends and len(shape.bends) < _MOST_BENDS]
        candidates = [_Shape(tuple(sorted((*shape.bends, bend))), shape.large) for bend in more]
        candidates += [_Shape(shape.bends, knee) for knee in large]
        found = min(((_criterion(cells, each), each) for each in candidates), default=(math.inf, shape))
        if found[0] >= least:
            return _times(shape, _coefficients(cells, shape, _REWEIGHTED))
        least, shape = found


def _criterion(cells: Sequence[Measurement], shape: _Shape) -> float:
    """Return the Bayesian information criterion of a fit."""
    columns, seconds = _columns(cells, shape)
    rates = _coefficients(cells, shape, _REWEIGHTED // 3)
    errors = np.abs(np.column_stack(columns) @ rates / seconds - 1.0)
    used = len(shape.bends) + bool(shape.large)
    # Assumes that relative errors are Laplace-distributed.
    return 2 * len(cells) * math.log(max(float(np.mean(errors)), 1e-6)) + used * math.log(len(cells))


def _coefficients(cells: Sequence[Measurement], shape: _Shape, rounds: int) -> Floats:
    columns, seconds = _columns(cells, shape)
    rates, scale = np.zeros(len(columns)), seconds
    for _ in range(rounds):
        rates = non_negative_least_squares(columns, seconds, scale)
        errors = np.abs(np.column_stack(columns) @ rates / seconds - 1.0)
        scale = seconds * np.sqrt(np.maximum(errors, _CLOSE) / _CLOSE)
    return rates


def _columns(cells: Sequence[Measurement], shape: _Shape) -> tuple[list[Floats], Floats]:
    # A request over HTTP adds to prompts alone. Then that cost cannot be told from a cost of mixed iterations.
    remote = any(one.requests for one in cells)
    rows = []
    for one in cells:
        parts = [_row(each, shape, mixed=not remote) for each in one.work]
        rows.append([*(sum(part) for part in zip(*parts, strict=True)), one.requests])
    columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    return columns, np.array([one.seconds for one in cells], dtype=np.float64)


def _row(work: IterationWork, shape: _Shape, *, mixed: bool) -> list[float]:
    tokens, squares, sequences, context = work
    large = max(sequences - shape.large, 0) if shape.large else 0
    fixed = [1.0, float(tokens > 0), float(mixed and tokens > 0 and sequences > 0)]
    return [*fixed, squares, sequences, large, context, *spread(tokens + sequences, shape.bends)]


def _times(shape: _Shape, rates: Floats) -> FittedTimes:
    base_s, prompt_s, mixed_s, square_s, sequence_s, large_s, context_s, *token_s, request_s = rates.tolist()
    times = IterationTimes(
        base_s=max(base_s, _LEAST_S),
        bends=shape.bends,
        token_s=tuple(token_s),
        square_s=square_s,
        sequence_s=sequence_s,
        context_s=context_s,
        prompt_s=prompt_s,
        mixed_s=mixed_s,
        large=shape.large,
        large_s=large_s,
    )
    return FittedTimes(times, request_s)
