"""Report of a fault suite: violations, waits after faults, capacity and leaks, as JSON, terminal tables and HTML."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

import msgspec
import numpy as np
from rich.markup import escape
from rich.table import Table

from twofold.reporting.chart import BOUND_COLOUR, Layout, ReportChart, axis, grid, line, run_colour
from twofold.reporting.output import JsonReport, table
from twofold.reporting.page import html_chart, html_page, html_section, html_table
from twofold.reporting.summary import NOTHING, rate_text, seconds
from twofold.torture.answers import BREAKS, Violation, ViolationKind, violations
from twofold.torture.config import TortureConfig
from twofold.torture.faults import InjectedFault, longest_wait
from twofold.torture.measures import Capacity
from twofold.torture.metrics import Leak, idle_prefills, leaks
from twofold.torture.run import TortureRun
from twofold.torture.streams import Ending

_ANSWERS: Final = ("", "Count", "First")
_WAITS: Final = ("Fault", "Runs", "Failed", "Longest wait: median", "max")
_CAPACITY: Final = ("", "Before", "After")
_SHOWN: Final = ("num_prompts", "max_prompt_tokens", "max_tokens", "concurrency", "duration_s", "every_s", "hang_s")
Section = tuple[str, Sequence[str], Iterator[Sequence[str]]]  # title, headings and rows


class TortureReport(JsonReport, frozen=True, kw_only=True):
    """JSON report of `twofold torture`. Times are seconds since the start of the load."""

    config: TortureConfig
    unreproducible: int  # prompts with two answers alone that differ
    compares_tokens: bool  # else text, because the server returns no token ids
    duration_s: float
    streams: dict[str, int]  # by behaviour of the client
    compared: int
    violations: list[Violation]
    faults: list[InjectedFault]
    undisturbed_wait_s: float | None  # longest wait for a token before the first fault
    before: Capacity
    after: Capacity
    leaks: list[Leak]
    idle_prefills: list[str] | None  # servers that served no prompt; None without metrics
    tokens_by_second: list[int]
    failures: list[str]

    @classmethod
    def of(cls, run: TortureRun, *, allow_broken: bool) -> "TortureReport":
        """Judge a fault suite. With `allow_broken`, broken and refused streams do not fail it."""
        found = list(_violations(run))
        before, after = run.before.metrics, run.after.metrics
        leaked = leaks(before, after) if before and after else []
        fault_s = run.faults[0].at_s if run.faults else run.ended_s
        undisturbed = (stream for stream in run.streams if stream.ended_s <= fault_s)
        return cls(
            config=msgspec.structs.replace(run.config, api_key=None),
            unreproducible=run.config.num_prompts - len(run.alone),
            compares_tokens=all(answer.reply.token_ids for answer in run.alone.values()),
            duration_s=run.ended_s - run.started_s,
            streams=dict(Counter(stream.behaviour.name for stream in run.streams).most_common()),
            compared=sum(stream.ending is Ending.COMPLETE for stream in run.streams),
            violations=found,
            faults=_timed_faults(run),
            undisturbed_wait_s=longest_wait(undisturbed, run.started_s, fault_s),
            before=run.before,
            after=run.after,
            leaks=leaked,
            idle_prefills=idle_prefills(before, after) if before and after else None,
            tokens_by_second=_tokens_by_second(run),
            failures=list(_failures(run, found, leaked, BREAKS if allow_broken else ())),
        )


def _violations(run: TortureRun) -> Iterator[Violation]:
    for stream in run.streams:
        for kind, position, detail in violations(stream, run.alone[stream.prompt.number]):
            yield Violation(
                kind=kind,
                prompt=stream.prompt.number,
                prompt_tokens=stream.prompt.request.prompt_tokens,
                client=stream.behaviour.name,
                at_s=stream.ended_s - run.started_s,
                fault=next((each.name for each in reversed(run.faults) if each.at_s < stream.ended_s), None),
                position=position,
                detail=detail,
            )


def _timed_faults(run: TortureRun) -> list[InjectedFault]:
    """Return the faults with the longest wait for a token after each."""
    ends = [*(fault.at_s for fault in run.faults[1:]), run.ended_s]
    return [
        msgspec.structs.replace(
            fault, at_s=fault.at_s - run.started_s, longest_wait_s=longest_wait(run.streams, fault.at_s, end_s)
        )
        for fault, end_s in zip(run.faults, ends, strict=False)
    ]


def _tokens_by_second(run: TortureRun) -> list[int]:
    times = [time_s - run.started_s for stream in run.streams for time_s in stream.reply.chunk_times_s]
    count = int(run.ended_s - run.started_s) + 1
    binned: list[int] = np.histogram(times, bins=count, range=(0, count))[0].tolist()
    return binned


def _failures(
    run: TortureRun, found: Sequence[Violation], leaked: Sequence[Leak], allowed: Sequence[ViolationKind]
) -> Iterator[str]:
    for kind, count in Counter(violation.kind for violation in found).items():
        if kind not in allowed:
            yield f"{kind.value}: {count}"
    before, after = run.before, run.after
    yield from (f"leak: {leak.gauge} {leak.before:g} before and {leak.after:g} after the load" for leak in leaked)
    if before.metrics and not after.metrics:
        yield "no metrics after the load"
    if not after.tokens_per_s:
        yield "no capacity after the load"
    if (after.longest_prompt or 0) < (before.longest_prompt or 0):
        yield f"longest prompt: {before.longest_prompt} tokens before and {after.longest_prompt} after the load"
    for name in dict.fromkeys(fault.name for fault in run.faults):
        if all(fault.error for fault in run.faults if fault.name == name):
            yield f"every run of the command {name} failed"


def torture_tables(report: TortureReport) -> list[Table]:
    """Return the report as terminal tables: answers, waits after faults, and capacity."""
    tables = []
    for title, headings, rows in _sections(report):
        tables.append(table(title, headings, (1,) if headings is _ANSWERS else range(1, len(headings))))
        for row in rows:
            tables[-1].add_row(*map(escape, row))
    return tables


def torture_page(report: TortureReport) -> str:
    """Return the report as an HTML page."""
    verdict = [[(failure, "missed")] for failure in report.failures] or [[("no failure", "met")]]
    body = [html_section("Verdict", html_table((), verdict)), html_chart(_chart(report))]
    body += [html_section(title, html_table(headings, rows)) for title, headings, rows in _sections(report)]
    shown = [(name.replace("_", " "), f"{getattr(report.config, name):g}") for name in _SHOWN]
    body += [html_section("Configuration", html_table((), [*shown, ("Twofold", report.twofold_version)]))]
    return html_page(f"Fault suite of {report.config.endpoint.model}", body)


def _sections(report: TortureReport) -> Iterator[Section]:
    endpoint, seed = report.config.endpoint, report.config.prompts.seed
    yield f"{endpoint.model} at {endpoint.base_url}, seed {seed}", _ANSWERS, _answer_rows(report)
    yield "Longest wait for a token after a fault", _WAITS, _wait_rows(report)
    yield "Capacity", _CAPACITY, _capacity_rows(report)


def _answer_rows(report: TortureReport) -> Iterator[Sequence[str]]:
    compared = "token ids" if report.compares_tokens else "text"
    yield "Prompts", str(report.config.num_prompts), f"{compared} of {report.config.reference.base_url}"
    yield "  not reproducible alone", str(report.unreproducible), ""
    clients = ", ".join(f"{count} {name}" for name, count in report.streams.items())
    yield "Streams", str(sum(report.streams.values())), clients
    yield "  read to the end", str(report.compared), ""
    for kind in ViolationKind:
        found = [each for each in report.violations if each.kind is kind]
        yield kind.value.capitalize(), str(len(found)), _example(found[0]) if found else ""


def _example(violation: Violation) -> str:
    where = "" if violation.position is None else f" at position {violation.position}"
    when = f"{violation.at_s:.1f} s" + (f", after {violation.fault}" if violation.fault else "")
    prompt = f"prompt {violation.prompt} ({violation.prompt_tokens} tokens, {violation.client})"
    return f"{prompt}{where}: {violation.detail} ({when})"


def _wait_rows(report: TortureReport) -> Iterator[Sequence[str]]:
    yield "(before the first)", "", "", "", seconds(report.undisturbed_wait_s)
    for name in dict.fromkeys(fault.name for fault in report.faults):
        runs = [fault for fault in report.faults if fault.name == name]
        waits = [fault.longest_wait_s for fault in runs if fault.longest_wait_s is not None]
        failed = sum(fault.error is not None for fault in runs)
        yield name, str(len(runs)), str(failed), *map(seconds, (median(waits), max(waits)) if waits else (None, None))


def _capacity_rows(report: TortureReport) -> Iterator[Sequence[str]]:
    both = (report.before, report.after)
    yield "Output tokens per second", *(rate_text(each.tokens_per_s) for each in both)
    yield "Longest prompt", *(str(each.longest_prompt or NOTHING) for each in both)
    yield from ((leak.gauge, f"{leak.before:g}", f"{leak.after:g}") for leak in report.leaks)
    if report.idle_prefills is None:
        yield "Load and KV usage", "no metrics", ""
    elif not report.leaks:
        yield "Load and KV usage", "idle", "idle"
    yield from ((f"Prompts of {server}", "", "none") for server in report.idle_prefills or ())


def _chart(report: TortureReport) -> ReportChart:
    """Plot the tokens of each second, with an upright line at each fault."""
    rates = line("tokens", range(len(report.tokens_by_second)), report.tokens_by_second, run_colour(0))
    look: Layout = {"color": BOUND_COLOUR, "width": 1, "dash": "dot"}
    upright: Layout = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": look}
    shapes = [{**upright, "x0": fault.at_s, "x1": fault.at_s} for fault in report.faults]
    layout = grid(1, 1, [(axis("Time (s)"), axis("Output tokens per second", rangemode="tozero"))], shapes=shapes)
    note = "Dotted lines mark faults."
    return ReportChart(id="tokens", title="Output under faults", note=note, traces=[rates], layout=layout)
