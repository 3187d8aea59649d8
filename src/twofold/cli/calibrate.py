"""`twofold calibrate`: make performance models from measurements."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Make performance models from measurements.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _group() -> None:
    """Make performance models from measurements."""


@app.command()
def fit(
    profile: Annotated[
        Path,
        typer.Argument(
            metavar="PROFILE",
            help="A csv of runs: model, hardware, tensor_parallel, prompt_size, batch_size, token_size, prompt_time "
            "and token_time (ms); optional e2e_time (ms), average_power (share of TDP).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The calibration file to write (TOML).")],
    folds: Annotated[
        int, typer.Option(min=2, help="Each configuration is left out once, in this many folds.")
    ] = 5,
    source: Annotated[
        str | None, typer.Option(help="Where the profile is from; its file name if not given.")
    ] = None,
    date: Annotated[
        str | None, typer.Option(help="When it was measured (YYYY-MM-DD); the file's own date if not given.")
    ] = None,
    note: Annotated[
        list[str] | None,
        typer.Option(help="HARDWARE=TEXT: what to know of that hardware's rows; kept with each of its fits."),
    ] = None,
) -> None:
    """Fit prefill and decode times to a measured profile, and show how well they predict what they did not see.

    Name the file in the environment variable TWOFOLD_CALIBRATION, and simulations use it before what the
    package brings.
    """
    from twofold.cli import calibrate_run  # noqa: PLC0415  (imports numpy)

    calibrate_run.fit_file(profile, out, folds=folds, source=source, date=date, notes=note or [])


@app.command()
def live(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The profile to write (YAML).")],
    kv_cache_memory_bytes: Annotated[str, typer.Option(help="KV cache of each worker, as in 500M.")] = "1GiB",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in an iteration at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Measure this host with MODEL on it: engine, hand-offs, gateway, and what workers cost each other.

    Serves the model split and colocated, a few minutes in all, and prints how well the fit predicts iterations
    that it did not see. The profile goes to `twofold simulate --profile` and `twofold verify`.
    """
    from twofold.cli import calibrate_live  # noqa: PLC0415  (imports numpy)

    calibrate_live.run(
        model, out, kv_cache_memory_bytes=kv_cache_memory_bytes, max_num_seqs=max_num_seqs, dtype=dtype
    )
