"""Measure the overload control of a live service under a load above the service's capacity.

The benchmark serves MODEL with one prefill worker and one decode worker on this host. The capacity is the
highest rate at which 90% of requests meet the SLO in a simulation of the service. The simulation uses a
profile of the host. Without `--profile`, the benchmark first measures the profile (`twofold calibrate live`).
Requests are sent open-loop at `--load` times the capacity (default: 2).

The benchmark exits with 1 unless:

- at least 90% of admitted requests are within the SLO, measured at the client
- 90% of rejections are answered within 50 ms
- the median error of the service's TTFT predictions is at most 15%
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from twofold.bench.client import Client, ClientConfig
from twofold.bench.endpoint import discover
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import metrics, served
from twofold.cli.calibrate import LiveSettings, calibrate_host
from twofold.errors import ConfigurationError
from twofold.events import Recorder
from twofold.fidelity.comparison import knee
from twofold.fidelity.service import ServiceDesign, SimulatedService, clients_beside
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import load_profile
from twofold.reporting.output import json_text
from twofold.request import Request
from twofold.scheduling.admission.overload import OVERLOAD_RULES
from twofold.slo import Slo
from twofold.timeline import Timeline
from twofold.workload.source import workload

# Larger batches are hardly faster here, and each request waits for its whole batch.
DESIGN = ServiceDesign(prefill=1, decode=1, max_num_batched_tokens=512)
KV, SEQS = "1GiB", 64
WARM_UP = 20  # sequential warm-up requests
AT_ONCE_S, IN_TIME, MEDIAN_ERROR = 0.05, 0.9, 0.15


class Answer(msgspec.Struct, frozen=True):
    """Result of one live request: error (None on success), and seconds until the end of the reply."""

    error: str | None
    detail: str | None
    seconds: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of requests, the share of admitted requests within the SLO, and the median seconds of a rejection."""

    sent: int
    admitted: int
    refused: int
    within: float | None
    refusal_s: float | None
    median_error: float | None  # of TTFT predictions


class Load:
    """Open-loop load generator that records every request's answer and timeline."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[Answer] = []
        self.timelines: list[Timeline] = []

    async def run(self, requests: Sequence[Request]) -> None:
        endpoint = await discover(self.url)
        lowest, vocabulary = token_range(endpoint.vocab_size)
        prompts = PromptMaker(lowest=lowest, vocabulary=vocabulary)
        async with Client(endpoint, Recorder([self.timelines.append]), ClientConfig()) as client:
            bodies = [client.body(request, prompts.prompt(request)) for request in requests]
            for request, body in zip(requests[:WARM_UP], bodies, strict=False):
                await self._send(client, msgspec.structs.replace(request, id=f"warm-{request.id}"), body)
            self.answers.clear()
            self.timelines.clear()
            began = time.monotonic()
            async with asyncio.TaskGroup() as sent:
                for request, body in zip(requests, bodies, strict=True):
                    await asyncio.sleep(began + request.arrival_s - time.monotonic())
                    sent.create_task(self._send(client, request, body))

    async def _send(self, client: Client, request: Request, body: bytes) -> None:
        began = time.monotonic()
        outcome = await client.send(request, body)
        self.answers.append(Answer(outcome.error, outcome.detail, time.monotonic() - began))


def median_error(exposition: str) -> float | None:
    """Return the median TTFT prediction error that the metrics of a service show; None without samples."""
    name = "twofold:ttft_prediction_error_ratio"
    counts = [
        (float(line.split('le="')[1].split('"')[0]), float(line.split()[-1]))
        for line in exposition.splitlines()
        if line.startswith(f"{name}_bucket")
    ]
    # The error is rounded up to the bound of a histogram bucket.
    half = counts[-1][1] / 2 if counts else 0.0
    return next((bound for bound, count in counts if count >= half), None) if half else None


def failures(load: Load, slo: Slo, error: float | None) -> Iterator[str]:
    """Return one sentence per expectation that does not hold."""
    taken = [line for line in load.timelines if line.output_tokens]
    refused = [each for each in load.answers if each.error in {"HTTP 429", "HTTP 400"}]
    others = Counter(each.error for each in load.answers if each.error and each not in refused)
    if others:
        yield f"requests failed otherwise: {dict(others)}"
    if not refused or not taken:
        yield f"{len(refused)} refused and {len(taken)} admitted are too few: give another --load"
        return
    good = sum(slo.met_by(line) for line in taken) / len(taken)
    if good < IN_TIME:
        yield f"{good:.1%} of admitted requests are within the SLO, not {IN_TIME:.0%}"
    slow = statistics.quantiles([each.seconds for each in refused], n=10)[-1] if len(refused) > 1 else 0.0
    if slow >= AT_ONCE_S:
        yield f"one rejection in ten takes {slow * 1e3:.0f} ms or more"
    if error is None or error > MEDIAN_ERROR:
        yield f"the median error of a predicted TTFT is above {MEDIAN_ERROR:.0%}"


def outcome(load: Load, slo: Slo, error: float | None) -> Outcome:
    taken = [line for line in load.timelines if line.output_tokens]
    waits = sorted(each.seconds for each in load.answers if each.error in {"HTTP 429", "HTTP 400"})
    return Outcome(
        sent=len(load.answers),
        admitted=len(taken),
        refused=len(waits),
        within=sum(slo.met_by(line) for line in taken) / len(taken) if taken else None,
        refusal_s=statistics.median(waits) if waits else None,
        median_error=error,
    )


def show(console: Console, load: Load, slo: Slo, error: float | None) -> None:
    taken = [line for line in load.timelines if line.output_tokens]
    refused = [each for each in load.answers if each.error in {"HTTP 429", "HTTP 400"}]
    console.print(f"{len(load.answers)} requests: {len(taken)} taken, {len(refused)} refused")
    for detail, count in Counter((each.detail or "").partition(";")[0] for each in refused).most_common():
        console.print(f"  {count} × {detail}")
    if taken:
        good = sum(slo.met_by(line) for line in taken) / len(taken)
        waits = sorted(line.ttft_s or 0.0 for line in taken)
        gaps = sorted(line.tpot_s or 0.0 for line in taken)
        at = len(taken) * 9 // 10
        console.print(f"within the SLO: {good:.1%}; P90 TTFT {waits[at]:.3f} s, P90 TPOT {gaps[at] * 1e3:.0f} ms")
    if refused:
        waits = sorted(each.seconds * 1e3 for each in refused)
        middle, ninth = waits[len(waits) // 2], waits[len(waits) * 9 // 10]
        console.print(f"a refusal takes {middle:.1f} ms median, {ninth:.1f} ms P90, {waits[-1]:.1f} ms maximum")
    console.print("median error of a predicted TTFT: " + ("–" if error is None else f"at most {error:.1%}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--rule", choices=tuple(OVERLOAD_RULES), default="predicted")
    parser.add_argument("--load", type=float, default=2.0, help="load relative to the service's capacity")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--workload", default="azure-conv")
    parser.add_argument("--length-scale", type=float, default=0.125)
    parser.add_argument("--slo", default="ttft=1.5,tpot=0.12")
    parser.add_argument("--json", type=Path, help="file for all results")
    args = parser.parse_args()
    console, slo = Console(width=140), Slo.parse(args.slo)

    def requests(rate: float) -> list[Request]:
        return list(
            workload(
                args.workload, rate=rate, num_requests=args.requests, length_scale=args.length_scale, max_model_len=2048
            )
        )

    with tempfile.TemporaryDirectory() as directory:
        profile = args.profile or Path(directory, "host.yaml")
        if args.profile is None:
            calibrate_host(LiveSettings(model=args.model, output=profile, max_num_seqs=SEQS))
        host = load_profile(profile)
        tokens = 2**30 // host.model.kv_bytes_per_token
        twin = SimulatedService(
            DESIGN, host, Path(directory), kv_capacity_tokens=tokens, max_num_seqs=SEQS, catalog=load_catalog()
        )
        capacity = knee(twin, requests, slo)
        console.print(
            f"{DESIGN.name} of {host.model.name} serves {capacity:.3g} requests/s within {args.slo}, as simulated; "
            f"{args.load:g} times that rate is sent"
        )
        flags = [*DESIGN.flags, "--kv-cache-memory-bytes", KV, "--max-num-seqs", str(SEQS)]
        flags += ["--overload", args.rule, "--slo", args.slo, "--profile", str(profile)]
        try:
            with served(args.model, flags) as url, clients_beside(DESIGN):
                load = Load(url)
                asyncio.run(load.run(requests(args.load * capacity)))
                error = median_error(metrics(url))
        except ConfigurationError as mistake:
            console.print(f"[red]{mistake}[/]")
            return 1
    show(console, load, slo, error)
    if args.json is not None:
        args.json.write_text(json_text(outcome(load, slo, error)), "utf-8")
    wrong = list(failures(load, slo, error))
    for sentence in wrong:
        console.print(f"[red]FAILED:[/] {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
