"""Compare an emulated service with its simulation on the same requests, cluster file and schedulers.

The service runs on this machine in real time. Latencies are compared request by request: first for sequential requests,
which show the overhead of an idle service, then under the load of `twofold bench`.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from twofold.bench.endpoint import Endpoint, discover
from twofold.bench.load import run_load
from twofold.bench.services import metrics, served
from twofold.cluster.file import load_cluster
from twofold.cluster.spec import ClusterSpec
from twofold.fidelity.measurement import load_config
from twofold.fidelity.service import timelines_of
from twofold.hardware.catalog import load_catalog
from twofold.reporting.output import json_text
from twofold.reporting.summary import LatencyDistribution, Summary, summarize
from twofold.request import Request
from twofold.timeline import Timeline
from twofold.workload.source import workload

CLUSTER = """
model: bloom-176b
router: jsq
pools:
  - {machines: 2, machine: dgx-h100, role: prefill}
  - {machines: 2, machine: dgx-h100, role: decode}
"""
METRICS = ("ttft_s", "tpot_s", "e2e_s")
# Request spans that are both recorded live and simulated, with their names in the service's metrics.
SPANS = {
    "queue_prefill_s": "request_queue_time_seconds",
    "ttft_s": "time_to_first_token_seconds",
    "transfer_s": "kv_transfer_seconds",
    "visible_transfer_s": "kv_transfer_visible_seconds",
}
IDLE_S = 5.0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """CPU cores used by the gateway and by an average worker, and memory of the whole service."""

    worker: float
    gateway: float
    memory_mb: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    simulated: float
    live: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Live and simulated latencies of the same requests, and the mean durations of request phases."""

    requests: int
    simulated: Summary
    live: Summary
    added_s: dict[str, LatencyDistribution]
    spans: dict[str, Span]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    cluster: ClusterSpec
    instances: int
    ready_s: float
    idle: Usage
    busy: Usage
    alone: Comparison
    loaded: Comparison


class Processes:
    """Processes of the service; measures their CPU time and memory."""

    def __init__(self) -> None:
        (self._gateway,) = psutil.Process().children()
        (fork_server,) = self._gateway.children()
        self.workers = fork_server.children()
        self._all = [self._gateway, fork_server, *self.workers]

    @contextmanager
    def measured(self) -> Iterator[list[Usage]]:
        """Measure resource usage during a `with` block. After the block, the yielded list contains the result."""
        usage: list[Usage] = []
        began, before = time.monotonic(), self._seconds()
        yield usage
        passed = time.monotonic() - began
        workers, gateway = (after - start for after, start in zip(self._seconds(), before, strict=True))
        pss = sum(process.memory_full_info().pss for process in self._all)
        each = workers / len(self.workers) / passed
        usage.append(Usage(worker=each, gateway=gateway / passed, memory_mb=pss / 1e6))

    def _seconds(self) -> tuple[float, float]:
        return sum(map(_cpu_s, self.workers)), _cpu_s(self._gateway)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def compare(endpoint: Endpoint, spec: ClusterSpec, requests: Sequence[Request]) -> Comparison:
    simulated = timelines_of(spec, requests, load_catalog())
    by_id = {timeline.request.id: timeline for timeline in simulated}
    before = _totals(endpoint.base_url)
    live = asyncio.run(run_load(load_config(endpoint), requests))
    after = _totals(endpoint.base_url)
    if live.errors:
        raise SystemExit(f"requests failed: {live.errors}")
    pairs = [(timeline, by_id[timeline.request.id]) for timeline in live.timelines]
    return Comparison(
        requests=len(pairs),
        simulated=summarize(simulated),
        live=summarize(live.timelines),
        added_s={name: added for name in METRICS if (added := _added(pairs, name)) is not None},
        spans={name: span for name in SPANS if (span := _span(name, simulated, before, after))},
    )


Totals = dict[str, tuple[float, float]]


def _totals(url: str) -> Totals:
    values = dict(line.rsplit(" ", 1) for line in metrics(url).splitlines() if not line.startswith("#"))

    def value(name: str) -> float:
        return float(values[f"twofold:{name}"])

    return {span: (value(f"{name}_sum"), value(f"{name}_count")) for span, name in SPANS.items()}


def _span(name: str, timelines: Sequence[Timeline], before: Totals, after: Totals) -> Span | None:
    seconds, count = (later - sooner for later, sooner in zip(after[name], before[name], strict=True))
    known = [value for timeline in timelines if (value := getattr(timeline, name)) is not None]
    return Span(simulated=sum(known) / len(known), live=seconds / count) if known and count else None


def _added(pairs: Sequence[tuple[Timeline, Timeline]], name: str) -> LatencyDistribution | None:
    both = [(getattr(live, name), getattr(simulated, name)) for live, simulated in pairs]
    return LatencyDistribution.of(live - simulated for live, simulated in both if None not in (live, simulated))


def one_by_one(count: int) -> list[Request]:
    """Return requests that arrive 2.5 s apart, so that each finds the service idle."""
    return [
        Request(id=f"alone-{i}", arrival_s=2.5 * i, prompt_tokens=200 * (i + 1), output_tokens=20) for i in range(count)
    ]


def run(spec: ClusterSpec, path: Path, requests: Sequence[Request], context: int) -> Report:
    began = time.monotonic()
    flags = ["--engine", "emulated", "--cluster", str(path), "--max-model-len", str(context)]
    with served(None, flags) as url:
        ready_s = time.monotonic() - began
        endpoint, processes = asyncio.run(discover(url)), Processes()
        with processes.measured() as idle:
            time.sleep(IDLE_S)
        compare(endpoint, spec, one_by_one(2))  # warm-up
        alone = compare(endpoint, spec, one_by_one(8))
        with processes.measured() as busy:
            loaded = compare(endpoint, spec, requests)
    return Report(
        cluster=spec,
        instances=len(processes.workers),
        ready_s=ready_s,
        idle=idle[0],
        busy=busy[0],
        alone=alone,
        loaded=loaded,
    )


def show(report: Report) -> None:
    console = Console()
    for title, comparison in (("Sequential requests", report.alone), ("Under load", report.loaded)):
        console.print(_table(f"{title}: {comparison.requests} requests", comparison))
    idle, busy = report.idle, report.busy
    console.print(
        f"{report.instances} instances, ready after {report.ready_s:.1f} s, {busy.memory_mb:.0f} MB in total. CPU "
        f"of an instance: {idle.worker:.2%} idle, {busy.worker:.2%} under load; of the gateway: {busy.gateway:.0%}."
    )


def _table(title: str, comparison: Comparison) -> Table:
    table = Table(title=title)
    for heading in ("ms", "", "P50", "P90", "P99", "mean"):
        table.add_column(heading, justify="left" if heading in {"ms", ""} else "right")
    for name in METRICS:
        rows = {
            "simulated": getattr(comparison.simulated, name),
            "live": getattr(comparison.live, name),
            "added per request": comparison.added_s.get(name),
        }
        for world, row in rows.items():
            if row is not None:
                numbers = (f"{value * 1e3:.1f}" for value in (row.p50, row.p90, row.p99, row.mean))
                table.add_row(name.removesuffix("_s").upper(), world, *numbers)
        table.add_section()
    client = comparison.live.ttft_s
    for name, span in comparison.spans.items():
        table.add_row(name.removesuffix("_s").replace("_", " "), "simulated", *_only_mean(span.simulated))
        table.add_row("", "live, in the service", *_only_mean(span.live))
        if name == "ttft_s" and client is not None:
            table.add_row("", "between service and client", *_only_mean(client.mean - span.live))
    return table


def _only_mean(seconds: float) -> tuple[str, ...]:
    return "", "", "", f"{seconds * 1e3:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="a cluster file (2 + 2 DGX-H100 with bloom-176b)")
    parser.add_argument("--workload", default="azure-conv")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=8192, help="longest prompt plus output")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = flags.cluster or Path(directory, "cluster.yaml")
        if flags.cluster is None:
            path.write_text(CLUSTER)
        requests = list(
            workload(
                flags.workload, rate=flags.rate, duration_s=flags.duration, seed=flags.seed, max_model_len=flags.context
            )
        )
        report = run(load_cluster(path), path, requests, flags.context)
    show(report)
    if flags.json is not None:
        flags.json.write_text(json_text(report), "utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
