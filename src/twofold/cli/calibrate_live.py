"""What `twofold calibrate live` does: serve, measure, fit, show and write."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from twofold.cli.sizes import parse_size
from twofold.cluster.cores import share_cores
from twofold.errors import ConfigurationError
from twofold.fidelity.calibrate import calibrate
from twofold.fidelity.measurement import OnGroup, measure
from twofold.hardware.hf_config import read_model
from twofold.performance.host_profile import HostProfile, dump_host_profile
from twofold.serving.launch.worker_plan import available_cores

_WORKERS = 2  # of each service that is measured


def run(
    model: Path,
    out: Path,
    *,
    kv_cache_memory_bytes: str = "1GiB",
    max_num_seqs: int = 64,
    dtype: str = "auto",
) -> None:
    """Measure the host, print what was found and write the profile."""
    known = read_model(model)
    kv_bytes = parse_size(kv_cache_memory_bytes)
    _require_writable(out)
    cores = available_cores()
    flags = ["--kv-cache-memory-bytes", str(kv_bytes), "--max-num-seqs", str(max_num_seqs), "--dtype", dtype]
    with _progress() as on_group:
        measured = measure(model, flags, max_num_seqs, on_group)
    profile = calibrate(
        measured,
        known,
        cores=len(cores),
        threads=len(share_cores(cores, _WORKERS)[0]),
        kv_capacity_tokens=kv_bytes // known.kv_bytes_per_token,
        source=f"twofold calibrate live, {os.uname().machine}, {len(cores)} cores",
        date=f"{datetime.now(UTC):%Y-%m-%d}",
    )
    out.write_text(dump_host_profile(profile), encoding="utf-8")
    Console().print(profile_table(profile))
    typer.echo(f"wrote {out}", err=True)


def profile_table(profile: HostProfile) -> Table:
    """What was measured, in figures that can be compared with what one knows."""
    engine, front, prefill, decode = profile.engine, profile.front, profile.prefill, profile.decode
    alone = (
        engine.seconds(1024, 1024 * 1024, 0, 0),
        engine.seconds(0, 0, 1, 512),
        engine.seconds(0, 0, 16, 8192),
    )
    rows = (
        ("prefill of 1,024 tokens", _ms(alone[0]), _percent(engine.prefill_error)),
        ("decode, 1 sequence of 512 tokens", _ms(alone[1]), _percent(engine.decode_error)),
        ("decode, 16 sequences of 512 tokens", _ms(alone[2]), ""),
        (
            "512 prompt tokens beside 8 decodes",
            _ms(engine.seconds(512, 512 * 512, 8, 4096)),
            _percent(engine.mixed_error),
        ),
        (
            "prefill, decode while other cores are busy",
            f"x {prefill.crowded:.2f}, x {decode.crowded:.2f}",
            "",
        ),
        (
            "and taking turns on a core, beyond the turns",
            f"x {prefill.shared:.2f}, x {decode.shared:.2f}",
            "",
        ),
        (
            "request of 1,024 tokens to a worker",
            _ms(front.request_s + 1024 * front.prompt_token_s + front.request_delay_s),
            "",
        ),
        (
            "an iteration's 8 tokens to clients",
            _ms(front.step_s + 8 * front.token_s + front.step_delay_s),
            "",
        ),
        ("KV from worker to worker", f"{profile.link.bytes_per_s / 1e9:.2g} GB/s", ""),
        ("hand-off after the first token, besides", _ms(profile.link.sync_s), ""),
    )
    table = Table(
        "",
        "",
        "error unseen",
        title=f"{profile.model.name} on this host: {profile.source}",
        title_justify="left",
    )
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def _progress() -> Iterator[OnGroup]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _design, _done, _total: None
        return
    columns = (
        TextColumn("measuring {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True) as bar:
        task = bar.add_task("")
        yield lambda design, done, total: bar.update(task, description=design, completed=done, total=total)


def _require_writable(out: Path) -> None:
    """Known before minutes are spent."""
    if out.is_dir() or not out.parent.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigurationError(f"cannot write {out}: name a file in a directory that you may write to")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.1%}"
