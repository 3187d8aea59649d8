"""The steps of `twofold plan --kv-capacity`: read the trace, look at every capacity, and show what pays."""

import math
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from twofold.cli.simulate_source import Source
from twofold.errors import ConfigurationError
from twofold.hardware.specs import StorageTier
from twofold.planning.capacity.plan import CapacityQuery, capacity_plan
from twofold.planning.problem import Problem
from twofold.reporting.plan.capacity import CapacityReport, capacity_tables
from twofold.workload.source import is_named

_DRAM, _DISK = "dram", "nvme"


class CapacityFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags that only this command has; prices are dollars for a GB and hour."""

    nodes: int | None = None
    dram_gb: float | None = None
    dram_price: float | None = None
    disk_price: float | None = None

    def require_none(self) -> None:
        """Raise ConfigurationError where one of them is given to another command."""
        for field in self.__struct_fields__:
            if getattr(self, field) is not None:
                raise ConfigurationError(f"--{field.replace('_', '-')} is for --kv-capacity: leave it out")


def read_question(problem: Problem, machines: str | None, flags: CapacityFlags) -> CapacityQuery:
    """Raises ConfigurationError for flags that make no question, and for a model that the machine does not hold."""
    names = [name.strip() for name in (machines or "").split(",") if name.strip()]
    if len(names) != 1:
        raise ConfigurationError(
            "--kv-capacity needs --machines: the one kind that prefills, as in --machines a100"
        )
    kind = problem.kind(names[0])
    problem.kv_capacity_tokens(kind)
    if flags.dram_gb is not None and not 0 <= flags.dram_gb < math.inf:
        raise ConfigurationError(f"--dram-gb {flags.dram_gb:g} cannot be: give 0 or more GB of each node")
    catalog, link = problem.catalog, problem.template.link_bytes_per_s
    if link is not None and not 0 < link < math.inf:
        raise ConfigurationError(f"--link-gb-per-s {link / 1e9:g} cannot be: give more than 0 GB/s")
    return CapacityQuery(
        model=catalog.model(problem.template.model),
        machine=catalog.machine(kind.name),
        performance=problem.performance(kind),
        accelerators=problem.tensor_parallel_on(kind),
        dram=_priced(catalog.tier(_DRAM), flags.dram_price, "--dram-price"),
        disk=_priced(catalog.tier(_DISK), flags.disk_price, "--disk-price"),
        nodes=flags.nodes,
        dram_gb=flags.dram_gb,
        link_bytes_per_s=link,
    )


def _priced(tier: StorageTier, price: float | None, flag: str) -> StorageTier:
    if price is None:
        return tier
    if not 0 <= price < math.inf:
        raise ConfigurationError(
            f"{flag} {price:g} cannot be: give the dollars of a GB for an hour, 0 or more"
        )
    return msgspec.structs.replace(tier, price_per_gb_h=price, source=flag)


def run(
    problem: Problem,
    question: CapacityQuery,
    *,
    html: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Look at all of the trace, and print the tables or the JSON."""
    if html is not None or output is not None:
        raise ConfigurationError("--kv-capacity has no page and no deployment: leave out --html and --output")
    arguments = problem.workload
    if is_named(arguments.workload):
        raise ConfigurationError(
            f"--kv-capacity needs a trace whose prompts have block ids: {arguments.workload} is generated, without any"
        )
    source = Source(
        workload=arguments.workload,
        start_s=arguments.start_s,
        length_scale=arguments.length_scale,
        max_model_len=arguments.max_model_len,
    )
    plan = capacity_plan(list(source.requests()), question)
    if as_json:
        typer.echo(CapacityReport.of(plan).json())
        return
    title = f"KV cache of {question.model.name}, {arguments.workload}, on {question.machine.name}"
    Console().print(capacity_tables(plan, title))
