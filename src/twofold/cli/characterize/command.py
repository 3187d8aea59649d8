"""`twofold characterize`: measure an instance or read its measurements, and fit a profile."""

import sys
from pathlib import Path
from typing import Final

import typer
from rich.console import Console, Group

from twofold.atomic_file import AtomicFile
from twofold.characterize.analysis import Characterization
from twofold.characterize.report.activity import Activity, activities
from twofold.characterize.report.charts import charts
from twofold.characterize.report.insights import insights
from twofold.characterize.report.page import html_report
from twofold.characterize.report.tables import characterization_table
from twofold.cli.characterize.measure import analyse, measure
from twofold.cli.characterize.settings import CSV, CharacterizeSettings
from twofold.cli.options import check_outputs
from twofold.cli.settings import command, refuse
from twofold.errors import require
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.performance.fitting.profile import ProfileRow, read_profile
from twofold.performance.profile import dump_profile, load_profile
from twofold.reporting.page import write_plots
from twofold.workload.source import workload

_NUM_REQUESTS: Final = 400


@command
def characterize(settings: CharacterizeSettings) -> None:
    """Measure prefill, decode and mixed iterations, fit a profile, and test the profile on held-out data.

    Pass the profile to `twofold plan`, `simulate` or `verify` with `--profile`. The report shows the charts of
    Splitwise's characterization (section III) for this instance, and whether the paper's seven insights hold.
    """
    catalog = load_catalog(settings.catalog)
    written = {name: path for name in ("output", "html") if (path := getattr(settings, name)) is not None}
    check_outputs(written, [*settings.catalog, *settings.against, settings.target])
    if settings.is_csv or settings.is_endpoint:
        refuse(settings, "power_caps", "needs a model directory")
    found = analyse(settings, catalog) if settings.is_csv else measure(settings, catalog)
    if settings.output is not None:
        require(
            len(found) == 1 + len(settings.power_caps),
            "--output is one profile: choose it by --model, --hardware and --tp",
        )
        for each, cap in zip(found, (None, *settings.power_caps), strict=True):
            path = settings.output_under(cap)
            if path is not None:
                AtomicFile(path).save(dump_profile(each.profile))
                typer.echo(f"wrote {path}", err=True)
    Console(width=None if sys.stdout.isatty() else 120).print(Group(*map(characterization_table, found)))
    if settings.html is not None or settings.plots is not None:
        _report(settings, catalog, found)


def _report(settings: CharacterizeSettings, catalog: Catalog, found: list[Characterization]) -> None:
    others = [Characterization(profile=load_profile(path), rows=_rows_beside(path)) for path in settings.against]
    shown = [*found, *others]
    sent = {name: list(workload(name, rate=1.0, num_requests=_NUM_REQUESTS)) for name in settings.workload}
    activity: dict[str, list[Activity]] = {}
    for each in shown:
        extended = each.profile.extend(catalog)
        runs = [activities(each.profile, extended, name, requests) for name, requests in sent.items()]
        activity[each.name] = [run for group in runs for run in group]
    drawn = charts(shown, activity, sent)
    if settings.html is not None:
        judged = {
            each.name: insights(each, sent, activity[each.name], [other for other in shown if other is not each])
            for each in shown
        }
        title = f"Characterization of {', '.join(dict.fromkeys(each.profile.model.name for each in shown))}"
        AtomicFile(settings.html).save(html_report(shown, judged, drawn, title=title))
        typer.echo(f"wrote {settings.html}", err=True)
    if settings.plots is not None:
        typer.echo(f"wrote {len(write_plots(drawn, settings.plots))} charts to {settings.plots}", err=True)


def _rows_beside(path: Path) -> tuple[ProfileRow, ...]:
    rows = path.with_suffix(CSV)
    return tuple(read_profile(rows)) if rows.is_file() else ()
