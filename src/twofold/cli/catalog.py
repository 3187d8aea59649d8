"""`twofold catalog`: show accelerators, machines, models, links and storage tiers, with the source of each value."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console, Group
from rich.table import Table

from twofold.cli.options import JSON, PERFORMANCE, TENSOR_PARALLEL
from twofold.cli.settings import Settings, command, flag, group
from twofold.errors import require
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.hardware.specs import Accelerator, Link, Machine, Model, StorageTier
from twofold.performance.aiconfigurator import BACKENDS, catalog_names, measured_versions
from twofold.performance.registry import performance_model
from twofold.performance.reuse import REST, PrefixCost, prefix_bytes_per_s, shortest_prefix
from twofold.reporting.output import json_text, table
from twofold.reporting.summary import NOTHING

Item = Accelerator | Machine | Model | Link | StorageTier


class CatalogSettings(Settings):
    """Flags that select catalog entries. The environment variable TWOFOLD_CATALOG can name more catalog files."""

    name: tuple[str, ...] = flag("Entries to show; all if none.", (), positional=True, metavar="NAME")
    catalog: tuple[Path, ...] = flag(
        "Catalog file (TOML) with more entries or other figures; repeatable.", (), metavar="FILE"
    )
    json: bool = JSON.field(False)


class EntrySettings(CatalogSettings):
    """All flags of the `twofold catalog` commands that show entries."""

    sources: bool = flag("Show the source of each figure.", False, names=("--sources",))


class PrefixCostSettings(CatalogSettings):
    """All flags of `twofold catalog reuse`."""

    model: str = flag("Model of the catalog.", "llama2-70b")
    prefix: int = flag("Length of the prefix in tokens.", 8192, ge=1)
    performance: str = PERFORMANCE.field("auto")
    tp: int | None = TENSOR_PARALLEL.field(unset="all accelerators of a machine")


def _shows(section: str, find: Callable[[Catalog, str], Item], summary: str) -> Callable[..., None]:

    def show(settings: EntrySettings) -> None:
        catalog = load_catalog(settings.catalog)
        items = [find(catalog, name) for name in settings.name] or list(getattr(catalog, section).values())
        if settings.json:
            typer.echo(json_text({item.name: _facts(item) for item in items}))
        else:
            Console().print(_sources(items) if settings.sources else _figures(items))

    show.__doc__ = summary
    return command(show)


@command
def reuse(settings: PrefixCostSettings) -> None:
    """Show the bandwidth above which loading a prefix's KV is faster than computing it."""
    catalog, tensor_parallel = load_catalog(settings.catalog), settings.tp
    model = catalog.model(settings.model)
    found = [catalog.machine(name) for name in settings.name] or list(catalog.machines.values())
    facts = {
        machine.name: _loading(catalog, model, machine, settings.performance, tensor_parallel, settings.prefix)
        for machine in found
        if settings.name or tensor_parallel is None or tensor_parallel <= machine.count
    }
    require(bool(facts), f"no machine has {tensor_parallel} accelerators")
    if settings.json:
        typer.echo(json_text(facts))
    else:
        Console().print(Group(_bandwidths(facts, model.name, settings.prefix), _prefixes(facts)))


class OperatorSettings(Settings):
    """All flags of `twofold catalog operators`."""

    json: bool = JSON.field(False)


@command
def operators(settings: OperatorSettings) -> None:
    """Show on which accelerators, and with which engines, operator times were measured: --performance aiconfigurator.

    The times and their interpolation are those of the package aiconfigurator-core.
    """
    versions, models = measured_versions(), catalog_names().models
    if settings.json:
        typer.echo(json_text({"versions": versions, "models": models}))
        return
    rows = ((name, *(found[backend] or "-" for backend in BACKENDS)) for name, found in versions.items())
    engines = table("Versions of engines with measured operators", ("accelerator", *BACKENDS), (), rows)
    Console().print(Group(engines, table("Models", ("model", "in aiconfigurator-core"), (), models.items())))


def _facts(item: Item) -> dict[str, object]:
    facts: dict[str, object] = msgspec.to_builtins(item)
    if isinstance(item, Model):
        facts["kv_bytes_per_token"] = item.kv_bytes_per_token
    if isinstance(item, Machine):
        facts["memory_bytes"] = item.memory_bytes
    return facts


def _figures(items: Sequence[Item]) -> Table:
    rows = [_row(item) for item in items]
    headings = ["", *rows[0]] if rows else ["no entries"]
    named = ((item.name, *row.values()) for item, row in zip(items, rows, strict=True))
    return table(None, headings, range(1, len(headings)), named)


def _sources(items: Sequence[Item]) -> Table:
    table = Table("", "date", "source", show_lines=True)
    for item in items:
        table.add_row(item.name, item.date, item.source)
    return table


def _row(item: Item) -> dict[str, str]:
    match item:
        case Accelerator():
            return {
                "memory": f"{item.memory_bytes / 1e9:,.1f} GB",
                "bandwidth": f"{item.memory_bytes_per_s / 1e9:,.0f} GB/s",
                "bf16": f"{item.flops_per_s / 1e12:,.0f} TFLOP/s",
                "interconnect": f"{item.interconnect_bytes_per_s / 1e9:,.0f} GB/s",
                "TDP": f"{item.tdp_w:,.0f} W",
            }
        case Machine():
            cap = f" at {item.power_cap:.0%} power" if item.power_cap < 1.0 else ""
            return {
                "accelerators": f"{item.count} × {item.accelerator.name}{cap}",
                "memory": f"{item.memory_bytes / 1e9:,.0f} GB",
                "network": f"{item.network_bytes_per_s / 1e9:,.0f} GB/s",
                "price": f"${item.price_per_h:,.2f}/h" if item.price_per_h else NOTHING,
                "TDP": f"{item.tdp_w:,.0f} W",
                "idle": f"{item.idle_w:,.0f} W",
            }
        case Model():
            active = item.active_parameters / 1e9
            context = item.max_context
            return {
                "parameters": f"{item.parameters / 1e9:,.1f}B",
                "active": f"{active:,.1f}B",
                "weights": f"{item.weight_bytes / 1e9:,.1f} GB",
                "layers": str(item.layers),
                "heads": f"{item.heads}/{item.kv_heads}" if item.kv_latent_dims is None else f"{item.heads}",
                "KV of a token": f"{item.kv_bytes_per_token:,} B",
                "context": "-" if context is None else f"{context:,}",
            }
        case Link():
            return {"bandwidth": f"{item.bytes_per_s / 1e9:,.2f} GB/s", "start-up": f"{item.latency_s * 1e6:,.0f} µs"}
        case StorageTier():
            return {
                "price": f"${1e3 * item.price_per_gb_h:,.3f}/h for 1,000 GB",
                "read by a machine": f"{item.bytes_per_s / 1e9:,.0f} GB/s",
            }


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """Break-even points between loading and computing the KV of a prefix.

    `peak` and `predicted` are break-even bandwidths in bytes/s. `peak` assumes computation at peak FLOP/s, as
    Mooncake does; `predicted` uses a performance model. `shortest` maps the name of a link, network or storage tier to
    the smallest predicted prefix length, in tokens, at which loading is faster than computing.
    """

    accelerators: int
    prefix: int
    peak: float
    predicted: float
    basis: str
    error: float | None  # relative prefill error of the performance model
    shortest: dict[str, int | None]  # by link, network or storage tier; None: no prefix is faster to load


def _loading(
    catalog: Catalog, model: Model, machine: Machine, performance: str, tensor_parallel: int | None, prefix: int
) -> Loading:
    accelerators = tensor_parallel or machine.count
    times = performance_model(performance, model, machine, accelerators)
    share, kv_bytes = accelerators / machine.count, model.kv_bytes_per_token
    ways = {link.name: (link.bytes_per_s, link.latency_s) for link in catalog.links.values()}
    ways |= {"its network": (share * machine.network_bytes_per_s, 0.0)}
    ways |= {f"its {tier.name}": (share * tier.bytes_per_s, 0.0) for tier in catalog.tiers.values()}
    return Loading(
        accelerators=accelerators,
        prefix=prefix,
        peak=PrefixCost.of(model).bytes_per_s(prefix, accelerators * machine.accelerator.flops_per_s),
        predicted=prefix_bytes_per_s(times, kv_bytes, prefix),
        basis=times.name,
        error=times.error.prefill,
        shortest={name: shortest_prefix(times, kv_bytes, *way) for name, way in ways.items()},
    )


def _bandwidths(facts: dict[str, Loading], model: str, prefix: int) -> Table:
    title = f"Loading {prefix:,} tokens of {model} beats computing them from so many GB/s on"
    bandwidths = table(title, ("instance", "as predicted", "at its peak", "predicted by"), (1, 2))
    for each in facts.values():
        error = "unknown error" if each.error is None else f"±{each.error:.0%}"
        bandwidths.add_row(
            each.basis.partition(" on ")[2],
            _gigabytes(each.predicted),
            _gigabytes(each.peak),
            f"{each.basis.split()[0]}, {error}",
        )
    return bandwidths


def _prefixes(facts: dict[str, Loading]) -> Table:
    title = f"The shortest prefix worth loading, in tokens, before {REST} more"
    prefixes = table(title, ["over", *facts], range(1, len(facts) + 1))
    for way in next(iter(facts.values())).shortest:
        shortest = (each.shortest[way] for each in facts.values())
        prefixes.add_row(way, *("-" if tokens is None else f"{tokens:,}" for tokens in shortest))
    return prefixes


def _gigabytes(bytes_per_s: float) -> str:
    return "-" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.2f}"


_ENTRIES: Final[dict[str, tuple[Callable[[Catalog, str], Item], str]]] = {
    "accelerators": (Catalog.accelerator, "Show accelerators: memory, bandwidth, compute and power of one GPU."),
    "machines": (Catalog.machine, "Show machines: accelerators, network, power and price; h100 is short for dgx-h100."),
    "models": (
        Catalog.model,
        "Show models: sizes, and the KV cache of a token; a NAME may be a directory with a config.json.",
    ),
    "links": (Catalog.link, "Show links: bandwidth in one direction, and start-up latency of a transfer."),
    "tiers": (Catalog.tier, "Show storage tiers for KV caches: price of a GB, and read bandwidth of a machine."),
}

app = group(
    "Show the accelerators, machines, models, links and storage tiers that plans are made of.",
    {section: _shows(section, *entry) for section, entry in _ENTRIES.items()}
    | {"operators": operators, "reuse": reuse},
)
