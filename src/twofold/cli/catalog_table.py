"""How `twofold catalog` prints what it knows; apart from its flags because its imports are slow."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from twofold.hardware.catalog import Catalog, load_catalog
from twofold.hardware.specs import Accelerator, Link, Machine, Model, StorageTier

Item = Accelerator | Machine | Model | Link | StorageTier


def show(kind: str, names: Sequence[str], files: Sequence[Path], *, sources: bool, as_json: bool) -> None:
    """Print the entries of a kind, all or those named, as a table or as a JSON object by name."""
    items = _items(load_catalog(files), kind, names)
    if as_json:
        facts = {item.name: _facts(item) for item in items}
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2))
    else:
        Console().print(_sources(items) if sources else _figures(items))


def _items(catalog: Catalog, kind: str, names: Sequence[str]) -> list[Item]:
    find: Mapping[str, Callable[[str], Item]] = {
        "accelerators": catalog.accelerator,
        "machines": catalog.machine,
        "models": catalog.model,
        "links": catalog.link,
        "tiers": catalog.tier,
    }
    every: Mapping[str, Mapping[str, Item]] = {
        "accelerators": catalog.accelerators,
        "machines": catalog.machines,
        "models": catalog.models,
        "links": catalog.links,
        "tiers": catalog.tiers,
    }
    return [find[kind](name) for name in names] if names else list(every[kind].values())


def _facts(item: Item) -> dict[str, object]:
    """All fields, and what follows from them."""
    facts: dict[str, object] = msgspec.to_builtins(item)
    if isinstance(item, Model):
        facts["kv_bytes_per_token"] = item.kv_bytes_per_token
    if isinstance(item, Machine):
        facts["memory_bytes"] = item.memory_bytes
    return facts


def _figures(items: Sequence[Item]) -> Table:
    """A row for each, in units that read well."""
    rows = [_row(item) for item in items]
    table = Table("", *rows[0]) if rows else Table("there are none")
    for column in table.columns[1:]:
        column.justify = "right"
    for item, row in zip(items, rows, strict=True):
        table.add_row(item.name, *row.values())
    return table


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
                "price": f"${item.price_per_h:,.2f}/h",
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
            return {
                "bandwidth": f"{item.bytes_per_s / 1e9:,.2f} GB/s",
                "start-up": f"{item.latency_s * 1e6:,.0f} µs",
            }
        case StorageTier():
            return {
                "price": f"${1e3 * item.price_per_gb_h:,.3f}/h for 1,000 GB",
                "read by a machine": f"{item.bytes_per_s / 1e9:,.0f} GB/s",
            }
