"""The steps of `twofold simulate`: run the workload, judge the run, show it and write what was asked for."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from twofold.cli.simulate_files import Files
from twofold.cli.simulate_progress import simulation_progress
from twofold.cli.simulate_replan import Replan
from twofold.cli.simulate_source import Source
from twofold.cluster.profiles import performance_of, with_host_profile
from twofold.cluster.spec import ClusterSpec
from twofold.errors import UserError
from twofold.hardware.catalog import Catalog
from twofold.performance.base import PerformanceModel
from twofold.performance.cost import ModelAccuracy
from twofold.performance.host_profile import HOST
from twofold.reporting.simulation.gantt import GanttRuns
from twofold.reporting.simulation.html import html_report
from twofold.reporting.simulation.report import SimulationReport, replan_table
from twofold.reporting.simulation.table import simulation_tables
from twofold.simulation.observers.base import Observer
from twofold.simulation.replanning import SimulatedReplanning
from twofold.simulation.result import SimulationResult, Verdict, verdict
from twofold.simulation.simulate import simulate
from twofold.slo import Slo, SlowdownSlo

DEFAULT_REFERENCE = "dgx-a100"
_FILE_COLUMNS = 120


def run(
    spec: ClusterSpec,
    source: Source,
    catalog: Catalog,
    *,
    slo: Slo | SlowdownSlo | None,
    attainment: float,
    reference: str | None,
    as_json: bool,
    files: Files,
    inputs: Sequence[Path] = (),
    overload: str | None = None,
    replan: Replan | None = None,
) -> None:
    """Simulate, write the files, and print the tables or the JSON; `inputs` are files that must stay as they are."""
    catalog = with_host_profile(spec, catalog)
    needed = reference is not None or isinstance(slo, SlowdownSlo)
    usual = DEFAULT_REFERENCE if spec.profile is None else HOST
    replanning = None if replan is None else replan.of(spec, catalog, slo, attainment)
    machine, base, why_not = _reference(reference or usual, spec, catalog, needed=needed)
    files.require_apart((source.workload, *inputs))
    writers, page = files.open()
    gantt = GanttRuns()
    observers = [*writers, gantt] if page is not None else writers
    result = _simulated(
        spec,
        source,
        catalog,
        slo=slo,
        base=base,
        observers=observers,
        replanning=replanning,
        overload=overload,
    )
    if why_not:  # said once all else is well: a mistake is one sentence
        typer.echo(why_not, err=True)
    error = None if base is None else base.error
    judged = None if slo is None else verdict(result, slo, attainment)
    title = f"{spec.model} on {_cluster(spec)}, {source.title()}"
    if page is not None:
        page.write(_page(title, result, slo=slo, judged=judged, gantt=gantt, reference=error).encode())
        page.commit()
    if as_json:
        facts, seed = source.facts(), source.seed
        report = SimulationReport.of(
            result,
            workload=facts,
            seed=seed,
            reference=machine,
            reference_error=error,
            slo=slo,
            judged=judged,
            replans=None if replanning is None else replanning.log,
        )
        typer.echo(report.json())
    else:
        _console().print(simulation_tables(result, title, judged, error))
        if replanning is not None:
            _console().print(replan_table(replanning.log))


def _simulated(
    spec: ClusterSpec,
    source: Source,
    catalog: Catalog,
    *,
    slo: Slo | SlowdownSlo | None,
    base: PerformanceModel | None,
    observers: Sequence[Observer],
    replanning: SimulatedReplanning | None,
    overload: str | None,
) -> SimulationResult:
    requests = source.requests()
    if replanning is not None:
        observers = [*observers, replanning]
    with simulation_progress(source.num_requests) as ticked:
        return simulate(
            spec,
            requests,
            catalog=catalog,
            slo=slo if isinstance(slo, Slo) else None,
            reference=base,
            observers=observers,
            progress=ticked,
            prepare=None if replanning is None else replanning.attach,
            overload=overload,
        )


def _reference(
    name: str, spec: ClusterSpec, catalog: Catalog, *, needed: bool
) -> tuple[str | None, PerformanceModel | None, str]:
    """The whole reference machine and its model; where nobody asked for it and it cannot be, a note why."""
    model = catalog.model(spec.model)
    try:
        machine = catalog.machine(name)
        return machine.name, performance_of(spec, model, machine, machine.count), ""
    except UserError as error:
        if needed:
            raise
        return None, None, f"note: no slowdowns against {name}: {error}"


def _page(
    title: str,
    result: SimulationResult,
    *,
    slo: Slo | SlowdownSlo | None,
    judged: Verdict | None,
    gantt: GanttRuns,
    reference: ModelAccuracy | None,
) -> str:
    name = _cluster(result.spec)
    verdicts = {} if judged is None else {name: judged}
    return html_report(
        {name: result}, title=title, slo=slo, verdicts=verdicts, runs={name: gantt}, reference=reference
    )


def _console() -> Console:
    """As wide as the terminal; a file is as wide as the tables."""
    return Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)


def _cluster(spec: ClusterSpec) -> str:
    return ", ".join(f"{pool.machines}x{pool.machine}:{pool.role}" for pool in spec.pools)
