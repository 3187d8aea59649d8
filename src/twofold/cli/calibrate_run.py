"""What `twofold calibrate` does; apart from its flags because its imports are slow."""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from twofold.errors import ConfigurationError
from twofold.performance.coefficients import Calibration, to_toml
from twofold.performance.fitting.fit import FitOptions, fit_profile
from twofold.performance.fitting.profile import read_profile

_HEADING = """Performance of models on accelerators, fitted by `twofold calibrate fit`.
Times in milliseconds; the formula is in twofold.performance.fitted. Errors are means of relative errors on
configurations that the fit had not seen."""
_COLUMNS = ("pair", "prefill", "decode", "tokens to", "batch to")


def fit_file(
    profile: Path, out: Path, *, folds: int, source: str | None, date: str | None, notes: Sequence[str]
) -> None:
    """Fit every pair of a profile, write the calibration file and print how good it is."""
    rows = read_profile(profile)
    if out.resolve() == profile.resolve():
        raise ConfigurationError(f"--out {out} is the profile itself: name another file")
    options = FitOptions(
        source=source or profile.name,
        date=_date(date) if date is not None else _modified(profile),
        folds=folds,
        notes=dict(_note(text) for text in notes),
    )
    fits = fit_profile(rows, options)
    _write(out, to_toml(fits, _HEADING))
    Console().print(fit_table(f"{profile.name}: errors on configurations not seen, {folds} folds", fits))
    for line in _drops(fits):
        typer.echo(f"dropped: {line}", err=True)
    typer.echo(f"wrote {len(fits)} calibrations to {out}", err=True)


def fit_table(title: str, fits: Sequence[Calibration]) -> Table:
    """One line for each pair, with its errors and how far its measurements reach."""
    table = Table(*_COLUMNS, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for entry in fits:
        table.add_row(
            entry.pair,
            _percent(entry.prefill_error),
            _percent(entry.decode_error),
            f"{entry.max_prefill_tokens:,}",
            str(entry.max_sequences),
        )
    return table


def _drops(fits: Sequence[Calibration]) -> Iterator[str]:
    for entry in fits:
        for reason in entry.dropped:
            yield f"{entry.pair}: {reason}"


def _percent(error: float | None) -> str:
    return "unknown" if error is None else f"{error:.1%}"


def _note(text: str) -> tuple[str, str]:
    hardware, equals, note = text.partition("=")
    if not (hardware and equals and note):
        raise ConfigurationError(f"--note {text!r} is not HARDWARE=TEXT")
    return hardware, note


def _date(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d{2}(-\d{2})?", text):
        raise ConfigurationError(f"--date {text!r} is no date: write YYYY-MM-DD")
    return text


def _modified(path: Path) -> str:
    return f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d}"


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror}") from error
