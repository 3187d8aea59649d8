"""`twofold bench`: send a workload to an OpenAI-compatible endpoint and report latency, throughput and goodput."""

import asyncio
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console

from twofold.atomic_file import AtomicFile
from twofold.bench.client import ClientConfig
from twofold.bench.endpoint import Endpoint, discover
from twofold.bench.load import LoadConfig, LoadResult, OnChange, RequestRecord, records, run_load
from twofold.bench.prompts import PromptForm, PromptMaker, token_range
from twofold.cli.options import DURATION, JSON, NUM_REQUESTS, RATE, SLO_BOUNDS, ApiSettings
from twofold.cli.progress import load_progress
from twofold.cli.settings import Settings, command, flag, refuse
from twofold.cli.workload import ArrivalSettings, nonempty
from twofold.reporting.output import JsonReport, same_fields, table
from twofold.reporting.summary import STATISTICS, LatencyDistribution, Summary, seconds, summarize, summary_table
from twofold.request import Request, RequestTimings
from twofold.slo import Slo
from twofold.workload.source import is_named, workload

DEFAULT_REQUESTS: Final = 100
DEFAULT_RATE: Final = 1.0
_INTERRUPTED: Final = 130
BEYOND: Final = "network_and_client_s"
PHASES: Final = (*RequestTimings.__struct_fields__, BEYOND)
PROMPT_FORMS: Final = {
    PromptForm.TOKENS.value: "Token ids, of exact length.",
    PromptForm.TEXT.value: "Text of about that length, for endpoints that take no token ids.",
}


class LoadSettings(ArrivalSettings):
    """Flags that select the requests to send."""

    workload: str = flag("Named workload, such as azure-conv, or path of a trace.", "azure-conv")
    rate: float | None = RATE.field(unset=f"that of the trace; {DEFAULT_RATE:g} for a named workload")
    num_requests: int | None = NUM_REQUESTS.field(unset=f"{DEFAULT_REQUESTS} without --duration")
    duration: float | None = DURATION.field(unset="no limit")

    def requests(self, context: int | None) -> list[Request]:
        """Return the requests to send. Raises ConfigurationError if there are none."""
        self.check_closed_loop()
        if self.concurrency is not None:
            refuse(self, "duration", "limits arrival times, which --concurrency ignores: give --num-requests")
        shape = self.shape() | {"max_model_len": self.max_model_len or context}
        few = self.num_requests is None and self.duration is None
        requests = workload(
            self.workload,
            rate=DEFAULT_RATE if self.rate is None and is_named(self.workload) else self.rate,
            num_requests=DEFAULT_REQUESTS if few else self.num_requests,
            duration_s=self.duration,
            **shape,
        )
        return list(nonempty(requests, f"workload {self.workload} has no request within the limits"))


class ClientSettings(ApiSettings, panel="Client"):
    """Flags that describe the endpoint and how requests are sent."""

    prompt_form: str = flag("Form of the prompts.", "tokens", choices=PROMPT_FORMS)
    shared_prefix: int = flag(
        "Begin all prompts with the same N tokens, also in other runs with this --seed. Without it, no prompt has a "
        "beginning that a prefix cache may know from an earlier run.",
        0,
        ge=0,
        metavar="N",
    )
    vocab_size: int | None = flag("Draw token ids below this size.", ge=2, unset="that of the endpoint")
    chat: bool = flag("Use /v1/chat/completions, with text prompts.", False)
    ignore_eos: bool = flag("Request outputs of exactly the workload's length.", True)
    temperature: float = flag("Sampling temperature; 0 is greedy.", 0.0, ge=0)
    max_concurrency: int | None = flag(
        "Maximum number of requests in flight; a wait for a slot counts as send lag.", ge=1, unset="no limit"
    )
    warmup: int = flag("Number of requests to send before measuring.", 0, ge=0)
    timeout: float = flag("Timeout of a request in seconds.", 600.0, ge=0.001)


class ReportSettings(Settings, panel="Output"):
    """Flags that set the contents and form of the report."""

    slo: Slo | None = SLO_BOUNDS.field()
    json: bool = JSON.field(False)
    output: Path | None = flag("Write the report to this file (JSON).", metavar="FILE")
    per_request: bool = flag("Include every request in the JSON report.", False)


class BenchSettings(ReportSettings, ClientSettings, LoadSettings):
    """All flags of `twofold bench`."""


class BenchReport(JsonReport, frozen=True, kw_only=True):
    """JSON report of `twofold bench`."""

    workload: str
    config: LoadConfig
    summary: Summary
    send_lag_s: LatencyDistribution | None
    packed_tokens: int
    cached_share: float | None
    timings: dict[str, LatencyDistribution]  # by phase, in seconds; empty if the endpoint reports none
    interrupted: bool
    requests: list[RequestRecord] | None = None

    @classmethod
    def of(
        cls, workload: str, config: LoadConfig, result: LoadResult, slo: Slo | None, *, per_request: bool
    ) -> "BenchReport":
        summary = summarize(result.timelines, duration_s=result.duration_s, slo=slo, errors=result.errors)
        return cls(
            workload=workload,
            config=msgspec.structs.replace(config, api_key=None),
            summary=summary,
            send_lag_s=LatencyDistribution.of(result.send_lags_s),
            packed_tokens=result.packed_tokens,
            cached_share=result.cached_share,
            timings=_timings(result),
            interrupted=result.interrupted,
            requests=records(result) if per_request else None,
        )

    def show(self) -> None:
        """Print the report as a terminal table."""
        notes = {"Send lag P99": seconds(self.send_lag_s.p99 if self.send_lag_s else None)}
        if self.cached_share is not None:
            notes["Prompt tokens cached"] = f"{self.cached_share:.1%}"
        if self.packed_tokens:
            notes["Tokens sharing a chunk"] = f"{self.packed_tokens:,}"
        endpoint = self.config.endpoint
        title = f"{endpoint.model} at {endpoint.base_url}, {self.workload}"
        Console().print(summary_table(self.summary, title, notes))
        if self.timings:
            names, columns = [name for name, _ in STATISTICS], range(1, 1 + len(STATISTICS))
            phases = table("Phases of a request", ("", *names), columns)
            for name in filter(self.timings.get, PHASES):
                values = (seconds(getattr(self.timings[name], field)) for _, field in STATISTICS)
                phases.add_row(name.removesuffix("_s"), *values, end_section=name in {"ttft_s", "first_gap_s"})
            Console().print(phases)


def _timings(result: LoadResult) -> dict[str, LatencyDistribution]:
    """Return the distribution of each phase, and of the part of the client's TTFT that the service does not see."""
    reported = result.timings
    values = {name: [getattr(timings, name, None) for timings, _ in reported] for name in PHASES}
    values[BEYOND] = [ttft_s - timings.ttft_s for timings, ttft_s in reported if timings.ttft_s is not None]
    found = {name: LatencyDistribution.of(seconds) for name, seconds in values.items()}
    return {name: each for name, each in found.items() if each is not None}


@command
def bench(settings: BenchSettings) -> None:
    """Send a workload to an OpenAI-compatible endpoint; report latency, throughput and goodput."""
    output = None if settings.output is None else AtomicFile(settings.output)
    config = load_config(asyncio.run(discover(settings.base_url, settings.model, settings.api_key)), settings)
    result = run_to_end(config, settings.requests(config.endpoint.max_model_len))
    report = BenchReport.of(settings.workload, config, result, settings.slo, per_request=settings.per_request)
    if settings.json:
        typer.echo(report.json())
    else:
        report.show()
    _show_notes(result)
    if output is not None:
        output.save(report.json())
    if result.interrupted:
        raise typer.Exit(_INTERRUPTED)
    if report.summary.failed and not report.summary.completed:
        raise typer.Exit(1)


def load_config(endpoint: Endpoint, settings: BenchSettings) -> LoadConfig:
    """Return the options of the load generator."""
    form = PromptForm.TEXT if settings.chat else PromptForm(settings.prompt_form)
    lowest, vocabulary = token_range(settings.vocab_size or endpoint.vocab_size)
    return LoadConfig(
        endpoint=endpoint,
        prompts=PromptMaker(
            form=form,
            salt=secrets.token_hex(8),
            lowest=lowest,
            vocabulary=vocabulary,
            **same_fields(PromptMaker, settings),
        ),
        client=ClientConfig(timeout_s=settings.timeout, **same_fields(ClientConfig, settings)),
        think_s=settings.think_time or 0.0,
        **same_fields(LoadConfig, settings),
    )


def run_to_end(config: LoadConfig, requests: Sequence[Request]) -> LoadResult:
    """Run a load. A first Ctrl-C ends the load early and returns its result; a second Ctrl-C ends the process."""
    with load_progress(len(requests)) as on_change:
        return asyncio.run(_run(config, requests, on_change))


async def _run(config: LoadConfig, requests: Sequence[Request], on_change: OnChange) -> LoadResult:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await run_load(config, requests, stop=stop, on_change=on_change)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _show_notes(result: LoadResult) -> None:
    """Print one example of each kind of failed request to stderr, and what else makes the report misleading."""
    examples = {outcome.error: outcome.detail for outcome in result.outcomes if outcome.error is not None}
    for reason, detail in examples.items():
        typer.echo(f"failed, for example: {reason}: {detail}", err=True)
    if result.cached_at_start:
        typer.echo(f"the service had {result.cached_at_start:,} tokens of the first prompt in its cache", err=True)
    if result.interrupted:
        typer.echo("interrupted: the report covers the requests so far", err=True)
