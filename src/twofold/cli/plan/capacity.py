"""`twofold plan --kv-capacity`: replay a trace to find the best DRAM and disk capacities of prefix caches."""

from typing import Final

import msgspec

from twofold.atomic_file import AtomicFile
from twofold.cli.plan.placement import only_machine
from twofold.cli.plan.settings import PlanSettings
from twofold.cli.workload import nonempty
from twofold.errors import require
from twofold.hardware.specs import StorageTier
from twofold.planning.capacity.plan import CapacityQuery, capacity_plan
from twofold.planning.problem import Problem
from twofold.reporting.outcome import PlanResult
from twofold.reporting.plan.capacity import CapacityReport, capacity_charts, capacity_page, capacity_tables
from twofold.workload.source import is_named, workload

_DRAM: Final = "dram"
_DISK: Final = "nvme"


def run_capacity(problem: Problem, settings: PlanSettings) -> PlanResult:
    """Plan the KV cache capacity. Raises ConfigurationError for invalid flags."""
    query = read_capacity_query(problem, settings)
    require(settings.output is None, "--kv-capacity plans no service: leave out --output")
    page = None if settings.html is None else AtomicFile(settings.html)
    name = settings.workload
    require(not is_named(name), f"--kv-capacity needs a trace with prefix blocks: {name} is generated without")
    requests = workload(
        name, start_s=settings.start, length_scale=settings.length_scale, max_model_len=settings.max_model_len
    )
    complete = nonempty(requests, f"workload {name} has no request within the limits")
    plan = capacity_plan(list(complete), query)
    title = f"KV cache of {query.model.name}, {name}, on {query.machine.name}"
    report, charts = CapacityReport.of(plan), capacity_charts(plan)
    if page is not None:
        page.save(capacity_page(plan, title))
    return PlanResult(verdict=report.text, report=report, charts=charts, tables=capacity_tables(plan, title))


def read_capacity_query(problem: Problem, settings: PlanSettings) -> CapacityQuery:
    """Convert the flags to inputs of a KV capacity plan. Raises ConfigurationError if the model does not fit."""
    kind = problem.kind(only_machine(problem, settings.machines, "--kv-capacity"))
    problem.kv_capacity_tokens(kind)
    catalog = problem.catalog
    return CapacityQuery(
        model=catalog.model(problem.template.model),
        machine=catalog.machine(kind.name),
        performance=problem.performance(kind),
        accelerators=problem.tensor_parallel_on(kind),
        dram=_priced(catalog.tier(_DRAM), settings.dram_price, "--dram-price"),
        disk=_priced(catalog.tier(_DISK), settings.disk_price, "--disk-price"),
        nodes=settings.nodes,
        dram_gb=settings.dram_gb,
        link_bytes_per_s=problem.template.link_bytes_per_s,
    )


def _priced(tier: StorageTier, price: float | None, flag: str) -> StorageTier:
    return tier if price is None else msgspec.structs.replace(tier, price_per_gb_h=price, source=flag)
