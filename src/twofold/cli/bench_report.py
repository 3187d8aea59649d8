"""The report of `twofold bench`: a table for the eye, JSON for everything else."""

from pathlib import Path

import msgspec
import typer
from rich.console import Console

from twofold import __version__
from twofold.bench.load import LoadConfig, LoadResult, RequestRecord, records
from twofold.errors import ConfigurationError
from twofold.reporting.summary import LatencyDistribution, Summary, seconds, summarize, summary_table
from twofold.slo import Slo


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes; the API key is never part of it. `requests` is None unless asked for."""

    twofold_version: str
    workload: str
    config: LoadConfig
    summary: Summary
    send_lag_s: LatencyDistribution | None
    packed_tokens: int
    interrupted: bool
    requests: list[RequestRecord] | None = None

    @classmethod
    def of(
        cls, workload: str, config: LoadConfig, result: LoadResult, slo: Slo | None, *, per_request: bool
    ) -> "BenchReport":
        summary = summarize(result.timelines, duration_s=result.duration_s, slo=slo, errors=result.errors)
        return cls(
            twofold_version=__version__,
            workload=workload,
            config=msgspec.structs.replace(config, api_key=None),
            summary=summary,
            send_lag_s=LatencyDistribution.of(result.send_lags_s),
            packed_tokens=result.packed_tokens,
            interrupted=result.interrupted,
            requests=records(result) if per_request else None,
        )

    def show(self, result: LoadResult) -> None:
        """Print the table to stdout, and one example of each kind of failure to stderr."""
        notes = {"Send lag P99": seconds(self.send_lag_s.p99 if self.send_lag_s else None)}
        if self.packed_tokens:
            notes["Tokens sharing a chunk"] = f"{self.packed_tokens:,}"
        endpoint = self.config.endpoint
        title = f"{endpoint.model} at {endpoint.base_url}, {self.workload}"
        Console().print(summary_table(self.summary, title, notes))
        examples = {outcome.error: outcome.detail for outcome in result.outcomes if outcome.error is not None}
        for reason, detail in examples.items():
            typer.echo(f"failed, for example: {reason}: {detail}", err=True)
        if self.interrupted:
            typer.echo("interrupted: this is what was measured so far", err=True)

    def write(self, path: Path) -> None:
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
        except OSError as error:
            raise ConfigurationError(f"--json {path} cannot be written: {error.strerror}") from error
