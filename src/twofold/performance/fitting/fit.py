"""Fit the coefficients of `twofold.performance.fitted` to a profile, and estimate the prediction error."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from twofold.errors import ConfigurationError, require
from twofold.performance.coefficients import Calibration, DecodeCoefficients, PrefillCoefficients
from twofold.performance.fitted import KNEE, LARGE_BATCH, LONG_TOKENS, long_share
from twofold.performance.fitting.profile import ProfiledBatch, ProfileRow, consistent_batches, decode_power

Floats = npt.NDArray[np.float64]


def non_negative_least_squares(columns: Sequence[Floats], target: Floats, scale: Floats) -> Floats:
    """Return the x ≥ 0 that minimizes Σ ((columns · x − target) / scale)²."""
    matrix = np.column_stack(columns) / scale[:, None]
    sizes = np.linalg.norm(matrix, axis=0)
    sizes[sizes == 0.0] = 1.0
    unscaled: Floats = nnls(matrix / sizes, target / scale)[0]
    return np.asarray(unscaled / sizes)


_ROUNDS = 8  # alternating fits of short and long batches; converges to the kept digits
_FEWEST = 3  # distinct sizes of short batches needed for floor and slope


class FitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a fit, and the source and date of the measurements."""

    source: str
    date: str
    folds: int = 5
    notes: Mapping[str, str] = {}  # by accelerator: text that is added to `Calibration.basis`


def fit_profile(rows: Sequence[ProfileRow], options: FitOptions) -> list[Calibration]:
    """Fit one calibration for each combination of LLM, accelerator and tensor parallelism in the profile `rows`."""
    pairs = sorted({row.pair for row in rows})
    require(bool(pairs), f"{options.source} has no rows to fit")
    for hardware in sorted(set(options.notes) - {hardware for _, hardware, _ in pairs}):
        raise ConfigurationError(f"{options.source} has no hardware {hardware}, which a note refers to")
    return [fit_pair([row for row in rows if row.pair == pair], options) for pair in pairs]


def fit_pair(rows: Sequence[ProfileRow], options: FitOptions) -> Calibration:
    """Fit one calibration to `rows`, which all have the same LLM, accelerator and tensor parallelism."""
    kept, dropped = consistent_batches(rows)
    prefills = [one for one in kept if one.prompt_time]
    decodes = [one for one in kept if one.token_time]
    model, hardware, tensor_parallel = rows[0].pair
    short = {one.prefill_tokens for one in prefills if one.prefill_tokens <= LONG_TOKENS}
    require(
        len(short) >= _FEWEST,
        f"the profile has {len(short)} consistent batch sizes up to {LONG_TOKENS:,} prompt tokens of "
        f"{model} on {hardware} TP{tensor_parallel}: measure at least {_FEWEST}",
    )
    require(bool(decodes), f"the profile has no token_time of {model} on {hardware} TP{tensor_parallel}")
    runs = sum(len(one.rows) for one in kept)
    note = options.notes.get(hardware)
    power = decode_power(kept)
    return Calibration(
        model=model,
        accelerator=hardware,
        tensor_parallel=tensor_parallel,
        prefill=fit_prefill(prefills),
        decode=fit_decode(decodes),
        prefill_error=_held_out(
            prefills, options.folds, lambda seen, one: prefill_ms(fit_prefill(seen), one) / one.prompt_time
        ),
        decode_error=_held_out(
            decodes, options.folds, lambda seen, one: decode_ms(fit_decode(seen), one) / one.token_time
        ),
        max_prefill_tokens=max(one.prefill_tokens for one in prefills),
        max_prompt_tokens=max(one.prompt_size for one in prefills),
        max_sequences=max(one.batch_size for one in decodes),
        rows=runs,
        basis=f"a fit to {runs} runs of this pair" + (f" ({note})" if note else ""),
        source=options.source,
        date=options.date,
        decode_power=None if power is None else _rounded(power),
        dropped=dropped,
    )


def fit_prefill(kept: Sequence[ProfiledBatch]) -> PrefillCoefficients:
    """Fit the prefill coefficients to measured batches."""
    short = [one for one in kept if one.prefill_tokens <= LONG_TOKENS]
    long = [one for one in kept if one.prefill_tokens > LONG_TOKENS]
    floor_ms, token_ms, long_token_ms, square_ms = 0.0, 0.0, 0.0, 0.0
    # Floor and token cost are fitted to short batches, the rest to long batches.
    for _ in range(_ROUNDS if long else 1):
        floor_ms, token_ms = _fit_short(short, square_ms)
        if long:
            long_token_ms, square_ms = _fit_long(long, floor_ms, token_ms)
    return PrefillCoefficients(*map(_rounded, (floor_ms, token_ms, long_token_ms, square_ms)))


def _fit_short(kept: Sequence[ProfiledBatch], square_ms: float) -> tuple[float, float]:
    """Return the minimum prefill time and the time per token, both in milliseconds, fitted to short batches."""
    tokens = _column(kept, lambda one: one.prefill_tokens)
    attention = square_ms * _column(kept, lambda one: one.squares)
    time = _column(kept, lambda one: one.prompt_time)
    power = np.maximum(time - attention, time / 2) ** KNEE
    floor, slope = non_negative_least_squares([np.ones_like(tokens), tokens**KNEE], power, power)
    return float(floor ** (1 / KNEE)), float(slope ** (1 / KNEE))


def _fit_long(kept: Sequence[ProfiledBatch], floor_ms: float, token_ms: float) -> tuple[float, float]:
    tokens = _column(kept, lambda one: one.prefill_tokens)
    share = _column(kept, lambda one: long_share(one.prefill_tokens))
    squares = _column(kept, lambda one: one.squares)
    time = _column(kept, lambda one: one.prompt_time)
    short = (floor_ms**KNEE + (token_ms * tokens) ** KNEE) ** (1 / KNEE)
    extra, square = non_negative_least_squares([tokens * share, squares], time - short, time)
    return float(extra), float(square)


def fit_decode(kept: Sequence[ProfiledBatch]) -> DecodeCoefficients:
    """Fit the decode coefficients to measured batches."""
    batch = _column(kept, lambda one: one.batch_size)
    large = np.maximum(batch - LARGE_BATCH, 0)
    context = _column(kept, lambda one: one.mean_context)
    time = _column(kept, lambda one: one.token_time)
    # One fit for all four coefficients, because the time is linear in them.
    found = non_negative_least_squares([np.ones_like(batch), batch, large, context], time, time)
    return DecodeCoefficients(*map(_rounded, found.tolist()))


def prefill_ms(fit: PrefillCoefficients, one: ProfiledBatch) -> float:
    """Return the predicted prefill time of a batch in milliseconds."""
    tokens = one.prefill_tokens
    short: float = (fit.floor_ms**KNEE + (fit.token_ms * tokens) ** KNEE) ** (1 / KNEE)
    return short + fit.long_token_ms * tokens * long_share(tokens) + fit.square_ms * one.squares


def decode_ms(fit: DecodeCoefficients, one: ProfiledBatch) -> float:
    """Return the predicted decode iteration time of a batch in milliseconds."""
    large = max(one.batch_size - LARGE_BATCH, 0)
    sequences = fit.sequence_ms * one.batch_size + fit.large_batch_ms * large
    return fit.base_ms + sequences + fit.context_ms * one.mean_context


def _held_out(
    kept: Sequence[ProfiledBatch], folds: int, ratio: Callable[[Sequence[ProfiledBatch], ProfiledBatch], float]
) -> float | None:
    """Return the mean error of a k-fold cross-validation, or None for too few batches. `ratio` fits and predicts."""
    if len(kept) < 2 * _FEWEST or folds < 2:
        return None
    seen = [[one for index, one in enumerate(kept) if index % folds != fold] for fold in range(folds)]
    return _rounded(fmean(abs(ratio(seen[index % folds], one) - 1) for index, one in enumerate(kept)), 3)


def _column(kept: Sequence[ProfiledBatch], value: Callable[[ProfiledBatch], float]) -> Floats:
    return np.array([value(one) for one in kept], dtype=np.float64)


def _rounded(value: float, digits: int = 6) -> float:
    """Round `value` to `digits` significant digits."""
    return float(f"{value:.{digits}g}")  # so that all machines write the same file
