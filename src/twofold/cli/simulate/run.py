"""Implementation of `twofold simulate`: simulate the workload, check the SLO, print the result and write files."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import typer
from rich.console import Console, Group

from twofold.atomic_file import AtomicFile
from twofold.cli.options import check_outputs
from twofold.cli.progress import simulation_progress
from twofold.cli.simulate.settings import SimulateSettings
from twofold.cli.simulate.spec import cluster_spec
from twofold.cluster.profiles import instance_profiles, performance_of, with_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError, UserError
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.profile import load_profile
from twofold.planning.splits import SplitPlanner
from twofold.reporting.outcome import Simulation
from twofold.reporting.simulation.gantt import GanttRuns
from twofold.reporting.simulation.html import html_report, pictures
from twofold.reporting.simulation.report import SimulationReport, replan_table
from twofold.reporting.simulation.table import simulation_tables
from twofold.scheduling.replan.replanner import Replanner, ReplanRules
from twofold.scheduling.replan.traffic import TrafficMonitor
from twofold.simulation.clients import ClosedLoop
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.observers.base import Observer
from twofold.simulation.observers.files import ChromeTrace, EventLog, ParquetTable, RequestTable
from twofold.simulation.replanning import SimulatedReplanning
from twofold.simulation.result import SimulationResult, verdict
from twofold.simulation.simulate import simulate
from twofold.slo import Slo, SlowdownSlo

DEFAULT_REFERENCE: Final = "dgx-a100"
_FILE_COLUMNS: Final = 120


def run(settings: SimulateSettings) -> None:
    """Run the simulation, and print tables or JSON. Raises ConfigurationError for invalid flags."""
    made = simulated(settings, keep_requests=False)
    for line in made.notes:  # after the run: an error is a single line
        typer.echo(line, err=True)
    if settings.json:
        typer.echo(made.report.json())
    else:
        Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS).print(made.tables)


def simulated(settings: SimulateSettings, *, keep_requests: bool = True) -> Simulation:
    """Run the simulation and write files. Raises ConfigurationError for invalid flags."""
    if settings.spare and not settings.replan:
        raise ConfigurationError(f"--spare {settings.spare} needs --replan")
    spec, catalog = cluster_spec(settings, load_catalog(settings.catalog))
    catalog = with_profiles(spec, catalog)
    replanning = _replanning(settings, spec, catalog) if settings.replan else None
    closed_loop = _closed_loop(settings)
    machine, reference, note = _reference(settings, spec, catalog)
    writers, page = _open_files(settings)
    gantt, requests = GanttRuns(), RequestTable()
    kept = [*([gantt] if page or keep_requests else []), *([requests] if keep_requests else [])]
    observers = [*writers, *kept, *([replanning] if replanning else [])]
    with simulation_progress(settings.num_requests) as on_progress:
        result = simulate(
            spec,
            () if closed_loop is not None else settings.requests(),
            catalog=catalog,
            slo=settings.slo if isinstance(settings.slo, Slo) else None,
            reference=reference,
            observers=observers,
            progress=on_progress,
            prepare=_prepare(replanning, closed_loop),
            overload=settings.overload,
        )
    error = None if reference is None else reference.error
    judged = None if settings.slo is None else verdict(result, settings.slo, settings.attainment)
    replans = None if replanning is None else replanning.log
    pools = ", ".join(f"{pool.machines}x{pool.machine}:{pool.role}" for pool in spec.pools)
    title = f"{spec.model} on {pools}, {settings.title}"
    if page is not None:
        slo = settings.slo
        page.save(html_report(pools, result, title=title, slo=slo, judged=judged, runs=gantt, reference=error))
    tables = simulation_tables(result, title, judged, error)
    return Simulation(
        pools=pools,
        result=result,
        report=SimulationReport.of(
            result,
            workload=settings.facts(),
            seed=settings.seed,
            reference=machine,
            reference_error=error,
            slo=settings.slo,
            judged=judged,
            replans=replans,
        ),
        tables=tables if replans is None else Group(tables, replan_table(replans)),
        charts=tuple(pictures(pools, result, settings.slo, gantt)) if keep_requests else (),
        verdict=judged,
        notes=tuple(filter(None, (note, _handed_off(result)))),
        requests=requests,
    )


def _closed_loop(settings: SimulateSettings) -> ClosedLoop | None:
    clients, think_s = settings.concurrency, settings.think_time or 0.0
    if clients is None:
        return None
    return ClosedLoop(settings.requests(), clients, think_s=think_s, duration_s=settings.duration_s)


def _prepare(*parts: SimulatedReplanning | ClosedLoop | None) -> Callable[[VirtualCluster], None]:
    """Return a function that attaches the parts of the simulation that are not None to a cluster."""

    def prepare(cluster: VirtualCluster) -> None:
        for part in parts:
            if part is not None:
                part.attach(cluster)

    return prepare


def _handed_off(result: SimulationResult) -> str:
    """Return a note about hand-offs between colocated instances; an empty text if there are none."""
    if not result.handoffs or any(pool.role is not Role.MIXED for pool in result.spec.pools):
        return ""
    return (
        f"note: {result.handoffs:,} of {result.arrived:,} requests were handed off between colocated instances; "
        "--router jsq hands off none"
    )


def _open_files(settings: SimulateSettings) -> tuple[list[Observer], AtomicFile | None]:
    files = settings.written_files
    inputs = (settings.workload, *settings.profiles, *settings.catalog, settings.cluster)
    check_outputs(files, [path for path in inputs if path is not None])
    kinds: dict[str, Callable[[Path], Observer]] = {
        "requests_table": ParquetTable,
        "chrome_trace": ChromeTrace,
        "event_log": EventLog,
    }
    # A file appears under its name only when complete.
    writers = [kind(files[name]) for name, kind in kinds.items() if name in files]
    return writers, AtomicFile(files["html"]) if "html" in files else None


def _replanning(settings: SimulateSettings, spec: ClusterSpec, catalog: Catalog) -> SimulatedReplanning:
    if not isinstance(settings.slo, Slo):
        raise ConfigurationError("--replan needs an SLO in seconds: give --slo, as in ttft=2,tpot=0.1")
    rules = ReplanRules(
        min_gain=settings.min_gain, min_between_s=settings.min_between, start_up_s=settings.start_up_time
    )
    planner = SplitPlanner(spec, catalog, settings.slo, attainment=settings.attainment, replicas=settings.spare > 0)
    spare = instance_profiles(spec, catalog)[-1].layout.instances if settings.spare else 0
    return SimulatedReplanning(Replanner(TrafficMonitor(), rules), planner, search_s=settings.search_time, spare=spare)


def _reference(
    settings: SimulateSettings, spec: ClusterSpec, catalog: Catalog
) -> tuple[str | None, PerformanceModel | None, str]:
    name = settings.reference or (load_profile(spec.profiles[0]).machine if spec.profiles else DEFAULT_REFERENCE)
    model = catalog.model(spec.model)
    try:
        machine = catalog.machine(name)
        return machine.name, performance_of(spec, model, machine, machine.count), ""
    except UserError as error:
        if settings.reference is not None or isinstance(settings.slo, SlowdownSlo):
            raise
        return None, None, f"note: no slowdowns against {name}: {error}"
