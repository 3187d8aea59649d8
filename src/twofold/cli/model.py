"""`twofold model create`: a small model to try everything with, made on the spot."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make models to try things with.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make models to try things with."""


@app.command()
def create(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write the model.", show_default=False)
    ],
    hidden_size: Annotated[int, typer.Option(min=32)] = 512,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads, shared by groups of heads.")] = 4,
    vocab_size: Annotated[int, typer.Option(min=1)] = 8192,
    max_model_len: Annotated[int, typer.Option(min=1, help="Longest context, in tokens.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that is not empty.")] = False,
) -> None:
    """Make a small Llama model with random weights and a real tokenizer; needs no network."""
    from twofold.engine.model_factory import ModelSpec, create_model  # noqa: PLC0415  (imports torch)

    spec = ModelSpec(
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        seed=seed,
        dtype=dtype,
    )
    create_model(directory, spec, force=force, report=lambda stage: typer.echo(f"{stage} …", err=True))
    typer.echo(directory)
