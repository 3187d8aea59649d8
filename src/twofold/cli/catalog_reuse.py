"""How `twofold catalog reuse` prints when loading a prefix beats computing it again."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.hardware.specs import Machine, Model
from twofold.performance.registry import performance_model
from twofold.performance.reuse import PUBLISHED, REST, PrefixCost, prefix_bytes_per_s, shortest_prefix

_A800_FLOPS, _A800S, _PREFIX = 312e12, 8, 8192  # what the published figure is for


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as one instance: bytes per second above which loading a prefix is quicker than computing it.

    `peak` counts FLOPs at the accelerators' peak, as the paper does; `predicted` asks a performance model, whose
    relative error of a prefill is `error`. `shortest` is the shortest prefix, in tokens, worth loading over each link,
    from each tier of its own or over its network, None where no prefix is; `shortest_at_peak` is that by FLOPs.
    """

    accelerators: int
    prefix: int
    peak: float
    predicted: float
    basis: str
    error: float | None
    shortest: dict[str, int | None]
    shortest_at_peak: dict[str, int]


def show(
    names: Sequence[str],
    files: Sequence[Path],
    *,
    model: str,
    prefix: int,
    performance: str,
    tensor_parallel: int | None,
    as_json: bool,
) -> None:
    """Print a table, or a JSON object by machine. Raises ConfigurationError for what the catalog does not know."""
    catalog = load_catalog(files)
    found = catalog.model(model)
    machines = [catalog.machine(name) for name in names] or list(catalog.machines.values())
    facts = {
        machine.name: _loading(catalog, found, machine, performance, tensor_parallel, prefix)
        for machine in machines
        if names or tensor_parallel is None or tensor_parallel <= machine.count
    }
    if not facts:
        raise ConfigurationError(f"no machine has {tensor_parallel} accelerators")
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2))
    else:
        Console().print(Group(_bandwidths(facts, found.name, prefix), _prefixes(facts), Text(_published())))


def _loading(
    catalog: Catalog,
    model: Model,
    machine: Machine,
    performance: str,
    tensor_parallel: int | None,
    prefix: int,
) -> Loading:
    accelerators = tensor_parallel or machine.count
    times = performance_model(performance, model, machine, accelerators)
    share, kv_bytes = accelerators / machine.count, model.kv_bytes_per_token
    ways = {link.name: (link.bytes_per_s, link.latency_s) for link in catalog.links.values()}
    ways |= {"its network": (share * machine.network_bytes_per_s, 0.0)}
    ways |= {f"its {tier.name}": (share * tier.bytes_per_s, 0.0) for tier in catalog.tiers.values()}
    needs, flops_per_s = PrefixCost.of(model), accelerators * machine.accelerator.flops_per_s
    return Loading(
        accelerators=accelerators,
        prefix=prefix,
        peak=needs.bytes_per_s(prefix, flops_per_s),
        predicted=prefix_bytes_per_s(times, kv_bytes, prefix),
        basis=times.name,
        error=times.error.prefill,
        shortest={name: shortest_prefix(times, kv_bytes, *way) for name, way in ways.items()},
        shortest_at_peak={name: needs.shortest_prefix(way[0], flops_per_s) for name, way in ways.items()},
    )


def _bandwidths(facts: dict[str, Loading], model: str, prefix: int) -> Table:
    table = Table(
        title=f"Loading {prefix:,} tokens of {model} beats computing them from so many GB/s on",
        title_justify="left",
    )
    for heading in ("instance", "as predicted", "at its peak"):
        table.add_column(heading, justify="left" if heading == "instance" else "right")
    table.add_column("predicted by")
    for each in facts.values():
        error = "unknown error" if each.error is None else f"±{each.error:.0%}"
        table.add_row(
            each.basis.partition(" on ")[2],
            _gigabytes(each.predicted),
            _gigabytes(each.peak),
            f"{each.basis.split()[0]}, {error}",
        )
    return table


def _prefixes(facts: dict[str, Loading]) -> Table:
    title = f"The shortest prefix worth loading, in tokens: as predicted, before {REST} more / at its peak"
    table = Table(title=title, title_justify="left")
    table.add_column("over")
    for name in facts:
        table.add_column(name, justify="right")
    for way in next(iter(facts.values())).shortest:
        cells = (f"{_tokens(each.shortest[way])} / {each.shortest_at_peak[way]:,}" for each in facts.values())
        table.add_row(way, *cells)
    return table


def _published() -> str:
    figure = PUBLISHED.bytes_per_s(_PREFIX, _A800S * _A800_FLOPS)
    return (
        f"Mooncake (FAST'25) has {_PREFIX:,} tokens of LLaMA-70B on {_A800S} A800 at their peak: "
        f"{_gigabytes(figure)} GB/s by its formula."
    )


def _gigabytes(bytes_per_s: float) -> str:
    return "-" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.2f}"


def _tokens(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"
