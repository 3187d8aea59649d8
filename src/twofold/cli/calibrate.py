"""`twofold calibrate`: fit performance models to measurements."""

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from twofold.atomic_file import AtomicFile
from twofold.cli.options import DTYPE, KV_CACHE_MEMORY, MAX_NUM_SEQS, MODEL_DIRECTORY, check_outputs
from twofold.cli.progress import measuring_progress
from twofold.cli.settings import Settings, command, flag, group
from twofold.cluster.layout import share_cores
from twofold.errors import require
from twofold.fidelity.calibrate import calibrate
from twofold.fidelity.measurement import measure
from twofold.hardware.hf_config import read_model
from twofold.performance.coefficients import Calibration, to_toml
from twofold.performance.fitting.fit import FitOptions, fit_profile
from twofold.performance.fitting.profile import date_of, read_profile
from twofold.performance.profile import MeasuredProfile, dump_profile
from twofold.reporting.output import table
from twofold.serving.launch.worker_plan import available_cores, threads_on

_WORKERS: Final = 2  # of each service that is measured


class FitSettings(Settings):
    """All flags of `twofold calibrate fit`."""

    profile: Path = flag(
        "CSV of runs: model, hardware, tensor_parallel, prompt_size, batch_size, token_size, prompt_time and "
        "token_time (ms); optional e2e_time (ms), average_power (share of TDP).",
        ...,
        positional=True,
        metavar="PROFILE",
    )
    output: Path = flag("Calibration file to write (TOML).", ..., names=("--output", "-o"), metavar="FILE")
    folds: int = flag("Number of cross-validation folds over the configurations.", 5, ge=2)
    source: str | None = flag("Origin of the profile.", unset="its file name")
    date: str | None = flag("Date of the measurement.", metavar="YYYY-MM-DD", unset="the date of the file")
    note: tuple[str, ...] = flag(
        "Remark that is kept with each fit of a hardware; repeatable.", (), metavar="HARDWARE=TEXT"
    )


class LiveSettings(Settings):
    """All flags of `twofold calibrate live`."""

    model: Path = MODEL_DIRECTORY.field(...)
    output: Path = flag("Profile to write (YAML).", ..., names=("--output", "-o"), metavar="FILE")
    kv_cache_memory_bytes: int = KV_CACHE_MEMORY.field(1 << 30, "1GiB")
    max_num_seqs: int = MAX_NUM_SEQS.field(64)
    dtype: str = DTYPE.field("auto")


_HEADING: Final = """Performance of models on accelerators, fitted by `twofold calibrate fit`.
Times are in milliseconds; the formula is in twofold.performance.fitted. Errors are mean relative errors on held-out
configurations."""


@command
def fit(settings: FitSettings) -> None:
    """Fit prefill and decode times to a measured profile, print the error on held-out configurations, and write the
    result to a file.

    Simulations use this file if the environment variable TWOFOLD_CALIBRATION has its path.
    """
    profile, output = settings.profile, settings.output
    rows = read_profile(profile)
    check_outputs({"output": output}, [profile])
    options = FitOptions(
        source=settings.source or profile.name,
        date=date_of(profile, rows) if settings.date is None else _date(settings.date),
        folds=settings.folds,
        notes=dict(_note(text) for text in settings.note),
    )
    fits = fit_profile(rows, options)
    AtomicFile(output).save(to_toml(fits, _HEADING))
    title = f"{profile.name}: errors on held-out configurations, {settings.folds} folds"
    Console().print(fit_table(title, fits))
    for entry in fits:
        for reason in entry.dropped:
            typer.echo(f"dropped: {entry.pair}: {reason}", err=True)
    typer.echo(f"wrote {len(fits)} calibrations to {output}", err=True)


def fit_table(title: str, fits: Sequence[Calibration]) -> Table:
    """Return a table with a row for each fitted pair of model and hardware."""
    rows = (
        (
            entry.pair,
            _percent(entry.prefill_error, "unknown"),
            _percent(entry.decode_error, "unknown"),
            f"{entry.max_prefill_tokens:,}",
            str(entry.max_sequences),
        )
        for entry in fits
    )
    return table(title, ("pair", "prefill", "decode", "tokens to", "batch to"), range(1, 5), rows)


def _percent(error: float | None, unknown: str = "") -> str:
    return unknown if error is None else f"{error:.1%}"


def _note(text: str) -> tuple[str, str]:
    hardware, equals, note = text.partition("=")
    require(bool(hardware and equals and note), f"--note {text!r} is not HARDWARE=TEXT")
    return hardware, note


def _date(text: str) -> str:
    require(bool(re.fullmatch(r"\d{4}-\d{2}(-\d{2})?", text)), f"--date {text!r} is not a date: write YYYY-MM-DD")
    return text


@command
def live(settings: LiveSettings) -> None:
    """Measure MODEL on this host, and fit a performance profile to the measurements.

    Serves the model disaggregated and colocated for a few minutes, to measure the engine, KV hand-offs, the gateway and
    interference between workers. Writes the profile to a file for `twofold simulate --profile`,
    `twofold serve --profile` and `twofold verify`. Prints the profile's prediction error on held-out iterations.
    """
    calibrate_host(settings)


def calibrate_host(settings: LiveSettings) -> None:
    """Run `twofold calibrate live`: measure the host, write the profile and print it."""
    known = read_model(settings.model)
    kv_cache_bytes, max_num_seqs = settings.kv_cache_memory_bytes, settings.max_num_seqs
    output = AtomicFile(settings.output)
    cores = available_cores()
    flags = ["--kv-cache-memory-bytes", str(kv_cache_bytes), "--max-num-seqs", str(max_num_seqs)]
    with measuring_progress(MofNCompleteColumn()) as on_group:
        measured = measure(settings.model, [*flags, "--dtype", settings.dtype], max_num_seqs, on_group)
    profile = calibrate(
        measured,
        known,
        cores=len(cores),
        threads=threads_on(share_cores(cores, _WORKERS)[0]),
        kv_capacity_tokens=kv_cache_bytes // known.kv_bytes_per_token,
        source=f"twofold calibrate live, {os.uname().machine}, {len(cores)} cores",
        date=f"{datetime.now(UTC):%Y-%m-%d}",
    )
    output.save(dump_profile(profile))
    Console().print(profile_table(profile))
    typer.echo(f"wrote {settings.output}", err=True)


def profile_table(profile: MeasuredProfile) -> Table:
    """Return a table of a host profile: iteration times, slowdowns, gateway times and KV transfer speed."""
    engine, host = profile.times, profile.shared_host
    front, prefill, decode = host.front, host.prefill, host.decode
    mixed_s = engine.seconds(512, 512 * 512, 8, 4096)
    request_s = front.request_s + 1024 * front.prompt_token_s + front.request_delay_s
    rows = [
        ("prefill of 1,024 tokens", _ms(engine.seconds(1024, 1024 * 1024, 0, 0)), _percent(engine.prefill_error)),
        ("decode, 1 sequence of 512 tokens", _ms(engine.seconds(0, 0, 1, 512)), _percent(engine.decode_error)),
        ("decode, 16 sequences of 512 tokens", _ms(engine.seconds(0, 0, 16, 8192)), ""),
        ("512 prompt tokens beside 8 decodes", _ms(mixed_s), _percent(engine.mixed_error)),
        ("slowdown of prefill, decode by busy cores", f"x {prefill.crowded:.2f}, x {decode.crowded:.2f}", ""),
        ("further slowdown by sharing a core", f"x {prefill.shared:.2f}, x {decode.shared:.2f}", ""),
        ("gateway, request of 1,024 tokens", _ms(request_s), ""),
        ("gateway, 8 tokens of an iteration", _ms(front.step_s + 8 * front.token_s + front.step_delay_s), ""),
    ]
    if profile.link is not None:
        rows += [
            ("KV transfer between workers", f"{profile.link.bytes_per_s / 1e9:.2g} GB/s", ""),
            ("hand-off overhead after the first token", _ms(profile.link.sync_s), ""),
        ]
    return table(f"{profile.model.name} on this host: {profile.source}", ("", "", "held-out error"), (), rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


app = group("Fit performance models to measurements.", {"fit": fit, "live": live})
