"""Read measured profiles, and drop inconsistent measurements.

A profile is a csv file with one measured run per row. The columns are the fields of `ProfileRow`.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from twofold.errors import ConfigurationError

_NOISE = 0.8  # a time below this share of another is clearly less, beyond noise


class ProfileRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement in a profile. Times are in milliseconds, or 0 if not measured."""

    model: str
    hardware: str
    tensor_parallel: int
    prompt_size: int
    batch_size: int
    token_size: int  # tokens to generate per sequence
    prompt_time: float = 0.0  # prefill of the whole batch
    token_time: float = 0.0  # mean decode iteration
    e2e_time: float | None = None  # reveals generations that ended early
    average_power: float | None = None  # share of TDP
    peak_power: float | None = None  # share of TDP
    # Of `twofold characterize`:
    running: int = 0  # decodes during the prefill
    running_context: int = 0  # KV tokens of these decodes
    chunks: int = 1  # iterations of the prefill beside these decodes
    mixed_time: float = 0.0  # total time of these iterations
    cached_time: float = 0.0  # TTFT when the same prompt is sent a second time
    transfer_time: float = 0.0  # by which a KV transfer delayed the second token
    idle_time: float = 0.0  # without work before a prefill
    cold_time: float = 0.0  # of that prefill
    date: str = ""  # of the measurement, as in 2026-11-25

    @property
    def pair(self) -> tuple[str, str, int]:
        return self.model, self.hardware, self.tensor_parallel

    @property
    def mean_context(self) -> float:
        """Number of KV tokens that a decode iteration reads for the batch, averaged over the iterations."""
        generated = float(self.token_size)
        if self.token_time and self.e2e_time is not None and self.e2e_time > self.prompt_time:
            generated = min(generated, 1 + (self.e2e_time - self.prompt_time) / self.token_time)
        return self.batch_size * (self.prompt_size + generated / 2)


_SIZES = tuple(field.name for field in msgspec.structs.fields(ProfileRow) if field.required)
COLUMNS = (*_SIZES, "prompt_time", "token_time")


def read_profile(path: Path) -> list[ProfileRow]:
    """Read all rows of a profile. Raises ConfigurationError with file, line and column for malformed data."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(_rows(path, csv.DictReader(file)))
    except OSError as error:
        raise ConfigurationError(f"cannot read profile {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path} is not a csv file: {error}") from error


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[ProfileRow]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigurationError(f"{path} lacks the columns {', '.join(missing)}: a profile has {', '.join(COLUMNS)}")
    for cells in reader:
        values = {name: cells[name] for name in ProfileRow.__struct_fields__ if cells.get(name)}
        try:
            yield msgspec.convert(values, ProfileRow, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{path}:{reader.line_num}: {error}") from error


def date_of(path: Path, rows: Iterable[ProfileRow]) -> str:
    """Return the date of the latest row of the profile at `path`. If no row has one, return the file's date."""
    latest = max((row.date for row in rows), default="")
    return latest or f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d}"


class ProfiledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Median prefill and decode times in ms over all runs with the same prompt and batch size; 0 if not measured."""

    prompt_size: int
    batch_size: int
    prompt_time: float
    token_time: float
    mean_context: float
    rows: tuple[ProfileRow, ...]

    @property
    def prefill_tokens(self) -> int:
        return self.prompt_size * self.batch_size

    @property
    def squares(self) -> int:
        return self.batch_size * self.prompt_size**2


def group_batches(rows: Iterable[ProfileRow]) -> list[ProfiledBatch]:
    """Group profile rows by prompt size and batch size, and compute the median of the measured times in each group."""
    groups: dict[tuple[int, int], list[ProfileRow]] = defaultdict(list)
    for row in rows:
        if row.prompt_time or row.token_time:
            groups[row.prompt_size, row.batch_size].append(row)
    return [_configuration(groups[key]) for key in sorted(groups)]


def _configuration(rows: Sequence[ProfileRow]) -> ProfiledBatch:
    return ProfiledBatch(
        prompt_size=rows[0].prompt_size,
        batch_size=rows[0].batch_size,
        prompt_time=_median(row.prompt_time for row in rows),
        token_time=_median(row.token_time for row in rows),
        mean_context=median(row.mean_context for row in rows),
        rows=tuple(rows),
    )


def _median(times: Iterable[float]) -> float:
    measured = [time for time in times if time]
    return median(measured) if measured else 0.0


def consistent_batches(rows: Sequence[ProfileRow]) -> tuple[list[ProfiledBatch], list[str]]:
    """Drop profile rows that are invalid or contradict other rows. Return the remaining measurements,
    grouped by prompt size and batch size, and sentences about the dropped rows.
    """
    positive = [row for row in rows if _positive(row)]
    dropped = []
    if len(positive) < len(rows):
        dropped.append(f"{len(rows) - len(positive)} rows: sizes or times that are not above 0")
    kept = group_batches(positive)
    # Two configurations contradict each other if the larger prefill was clearly faster, probably because it ran in
    # parts.
    while odds := _most_at_odds(kept):
        worst, others = odds
        kept.remove(worst)
        dropped.append(
            f"{len(worst.rows)} rows: prompt_size {worst.prompt_size}, batch_size {worst.batch_size}: prompt_time "
            f"contradicts that of {others} other configurations"
        )
    return kept, dropped


def _positive(row: ProfileRow) -> bool:
    sizes = (row.prompt_size, row.batch_size, row.token_size)
    times = (row.prompt_time, row.token_time, row.mixed_time, row.transfer_time)
    finite = all(time >= 0 and math.isfinite(time) for time in times)
    return finite and any(times) and all(size > 0 for size in sizes)


def _most_at_odds(kept: Sequence[ProfiledBatch]) -> tuple[ProfiledBatch, int] | None:
    """Return the batch that contradicts the most other batches, and the number of contradictions.

    Return None if no batches contradict each other. Two batches contradict each other if the batch with more
    prefill tokens has a clearly shorter prefill time.
    """
    odds = [(sum(_contradict(one, other) for other in kept), one.prefill_tokens, one) for one in kept]
    others, _, worst = max(odds, key=lambda entry: entry[:2], default=(0, 0, None))
    return (worst, others) if worst is not None and others else None


def _contradict(one: ProfiledBatch, other: ProfiledBatch) -> bool:
    few, many = sorted((one, other), key=lambda configuration: configuration.prefill_tokens)
    if not (few.prompt_time and many.prompt_time):
        return False
    return few.prefill_tokens < many.prefill_tokens and many.prompt_time < _NOISE * few.prompt_time


def decode_power(kept: Iterable[ProfiledBatch]) -> float | None:
    """Return the share of TDP that decoding one sequence draws, or None if it was not measured."""
    # Runs with one sequence and a short prompt decode nearly all the time.
    shares = [
        row.average_power
        for configuration in kept
        for row in configuration.rows
        if row.batch_size == 1 and row.prompt_size <= 2048 and row.average_power and 0 < row.average_power < math.inf
    ]
    return median(shares) if shares else None


def consistent_rows(rows: Sequence[ProfileRow]) -> list[ProfileRow]:
    """Drop invalid profile rows and batches that contradict other batches. Return the remaining rows.

    Batches contradict each other if the batch with more prefill tokens has a clearly shorter prefill
    time. Rows of mixed iterations, KV transfers or prefills after an idle time are never dropped.
    """
    kept = [row for batch in consistent_batches(rows)[0] for row in batch.rows]
    return kept + [row for row in rows if row.mixed_time or row.transfer_time or row.cold_time]
