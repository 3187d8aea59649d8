"""`twofold model create`: a small model with random weights, to try everything with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twofold.cli.settings import Flag, Settings, command, group


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """All flags of `twofold model create`."""

    directory: Annotated[Path, Flag("Directory to write.", positional=True, metavar="DIR")]
    hidden_size: Annotated[int, Flag("Hidden size.", ge=32)] = 512
    layers: Annotated[int, Flag("Number of layers.", ge=1)] = 8
    heads: Annotated[int, Flag("Number of attention heads.", ge=1)] = 8
    kv_heads: Annotated[int, Flag("Number of key/value heads.", ge=1)] = 4
    vocab_size: Annotated[int, Flag("Vocabulary size.", ge=1)] = 8192
    max_model_len: Annotated[int, Flag("Context in tokens.", ge=1)] = 4096
    seed: Annotated[int, Flag("Random seed of the weights.", ge=0)] = 0
    dtype: Annotated[str, Flag("Data type of the weights: float32, bfloat16 or float16.")] = "float32"
    force: Annotated[bool, Flag("Write into a directory that is not empty.")] = False


@command
def create(settings: ModelSettings) -> None:
    """Create a small Llama model with random weights and a real tokenizer; needs no network."""
    from twofold.engine.model_factory import ModelSpec, create_model  # noqa: PLC0415  (imports torch)

    spec = ModelSpec(
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_model_len,
        seed=settings.seed,
        dtype=settings.dtype,
    )
    create_model(
        settings.directory, spec, force=settings.force, report=lambda stage: typer.echo(f"{stage} …", err=True)
    )
    typer.echo(settings.directory)


app = group("Create models to try things with.", {"create": create})
