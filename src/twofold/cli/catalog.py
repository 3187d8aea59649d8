"""`twofold catalog`: which accelerators, machines, models, links and tiers are known, where each figure comes from, and
when loading a prefix beats computing it."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Show the accelerators, machines, models, links and tiers of storage that plans are made of.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_FILES = "A file with more entries, or other figures (TOML); also TWOFOLD_CATALOG."

NameArgument = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Only these.", show_default=False)
]
MachineArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="MACHINE", help="Only these machines.", show_default=False),
]
FilesOption = Annotated[list[Path] | None, typer.Option("--catalog", help=_FILES)]
SourcesOption = Annotated[bool, typer.Option("--sources", help="Show where the figures come from.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def accelerators(
    name: NameArgument = None,
    *,
    catalog: FilesOption = None,
    sources: SourcesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show accelerators: memory, bandwidth, compute and power of one GPU."""
    _show("accelerators", name, catalog, sources=sources, as_json=as_json)


@app.command()
def machines(
    name: NameArgument = None,
    *,
    catalog: FilesOption = None,
    sources: SourcesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show machines: accelerators, network, power and price; dgx-h100 may be called h100."""
    _show("machines", name, catalog, sources=sources, as_json=as_json)


@app.command()
def models(
    name: NameArgument = None,
    *,
    catalog: FilesOption = None,
    sources: SourcesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show models: sizes, and the KV cache of a token; a NAME may be a directory with a config.json."""
    _show("models", name, catalog, sources=sources, as_json=as_json)


@app.command()
def links(
    name: NameArgument = None,
    *,
    catalog: FilesOption = None,
    sources: SourcesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show links: bandwidth of one direction, and the cost of starting a transfer."""
    _show("links", name, catalog, sources=sources, as_json=as_json)


@app.command()
def tiers(
    name: NameArgument = None,
    *,
    catalog: FilesOption = None,
    sources: SourcesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what KV caches can be kept in beside accelerators: price of a GB, and how fast a machine reads it."""
    _show("tiers", name, catalog, sources=sources, as_json=as_json)


@app.command()
def reuse(
    name: MachineArgument = None,
    *,
    model: Annotated[str, typer.Option(help="A model of the catalog.")] = "llama2-70b",
    prefix: Annotated[int, typer.Option(min=1, help="Tokens that could be loaded.")] = 8192,
    performance: Annotated[str, typer.Option(help="Performance model: auto, fitted, roofline, …")] = "auto",
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Accelerators of an instance; all of a machine.")
    ] = None,
    catalog: FilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show when loading a prefix beats computing it: from which bandwidth, and over each link from which length."""
    from twofold.cli import catalog_reuse  # noqa: PLC0415 (too heavy for the start of every command)

    catalog_reuse.show(
        name or [],
        catalog or [],
        model=model,
        prefix=prefix,
        performance=performance,
        tensor_parallel=tensor_parallel,
        as_json=as_json,
    )


def _show(
    kind: str, names: list[str] | None, files: list[Path] | None, *, sources: bool, as_json: bool
) -> None:
    from twofold.cli import catalog_table  # noqa: PLC0415 (too heavy for the start of every command)

    catalog_table.show(kind, names or [], files or [], sources=sources, as_json=as_json)
