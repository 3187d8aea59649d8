"""Characterize an instance on a GPU, and compare simulations from its profile with live services on this GPU.

The torch engine is measured in process, then as a service with one worker, over HTTP. The HTTP profile predicts
two services at several rates: one colocated worker, and one prefill and one decode worker, which share the GPU. By how
much they slow each other down, and by how much the host is slower than at the characterization, is measured with a
few requests. Prints the held-out errors of both profiles, the difference between them, and simulated and measured SLO
attainment, TTFT, TPOT and E2E.

Without --model, the benchmark creates a model of 16 layers with random bfloat16 weights and the width of Llama 3.1 8B.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from handoff_on_gpu import create_model, device_name
from twofold.bench.services import served
from twofold.characterize.contention import with_contention
from twofold.characterize.endpoint import EndpointTarget
from twofold.characterize.sweep import measured_slowness
from twofold.errors import UserError
from twofold.fidelity.comparison import Comparison, OfferedLoad, compare_endpoint, default_slo, knee, replay_on
from twofold.fidelity.service import ServiceDesign, SimulatedEndpoint
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import MeasuredProfile, load_profile
from twofold.reporting.output import json_text
from twofold.reporting.summary import LatencyDistribution, Summary
from twofold.request import Request
from twofold.workload.source import workload

TWOFOLD = [sys.executable, "-m", "twofold.cli.main"]
DESIGNS = (ServiceDesign(colocated=1), ServiceDesign(prefill=1, decode=1))
LOCAL, SERVED = "in process", "over HTTP"
SEARCHED = 500  # requests
WARM_UPS = 8
TRANSFER_S = 15.0
METRICS = ("ttft_s", "tpot_s", "e2e_s")
PERCENTILES = ("p50", "p99")
# (prompt tokens, their square, decodes, context tokens of the decodes)
BATCHES = [
    (tokens, tokens * tokens, decodes, 1024 * decodes)
    for tokens in (0, 256, 1024)
    for decodes in (0, 4, 32)
    if tokens or decodes
]


class Benchmark:
    """Characterizes one model on one GPU, and compares its services with simulations."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.model: Path = given.model or folder / "model"
        if given.model is None:
            create_model(self.model)
        self.limits = ["--max-num-batched-tokens", str(given.max_num_batched_tokens)]

    @property
    def engine(self) -> list[str]:
        given = self.given
        memory = ["--kv-cache-memory-bytes", given.kv, "--max-model-len", str(given.max_model_len)]
        return ["--device", given.device, "--max-num-seqs", "256", *memory, *self.limits]

    def path(self, way: str) -> Path:
        return self.folder / f"{way.replace(' ', '-')}.yaml"

    def characterize(self, target: str, way: str, budget_s: float, *flags: str) -> MeasuredProfile:
        path = self.path(way)
        common = ["--output", str(path), "--hardware", "gpu", "--budget", str(budget_s)]
        subprocess.run([*TWOFOLD, "characterize", target, *common, *flags], check=True)
        return load_profile(path)

    def compare(self, url: str, design: ServiceDesign) -> list[Comparison]:
        """Compare a running service with its simulation at each load."""
        alone = load_profile(self.path(SERVED))
        target = EndpointTarget(url, max_num_batched_tokens=self.given.max_num_batched_tokens)
        profile = with_contention(alone, target, design.counts)
        if profile.host is not None:
            prefill, decode = profile.host.prefill, profile.host.decode
            say(f"{design.name}: contention x{prefill.crowded:.2f} with prompts, x{decode.crowded:.2f} without")
        twin = SimulatedEndpoint(design, profile, self.folder, profile.extend(load_catalog()))
        slo = default_slo(alone, self.requests(1.0))
        highest = knee(twin, self.requests, slo)
        rates = [round(highest * load, 3) for load in self.given.loads]
        loads = [OfferedLoad(requests=self.requests(rate, self.given.seconds), rate=rate) for rate in rates]
        replay_on(url, OfferedLoad(requests=loads[0].requests[:WARM_UPS]))
        return compare_endpoint(
            partial(replay_on, url),
            twin,
            loads,
            slo=slo,
            replays=1,
            on_load=say,
            slowdowns=partial(measured_slowness, target, alone),
        )

    def requests(self, rate: float, seconds: float | None = None) -> list[Request]:
        """Return the requests of `seconds` seconds at a given rate, or 500 requests if `seconds` is None."""
        given = self.given
        count = SEARCHED if seconds is None else None
        drawn = workload(
            given.workload,
            rate=rate,
            duration_s=seconds,
            num_requests=count,
            arrival="poisson",
            seed=given.seed,
            max_model_len=given.longest,
        )
        return list(drawn)

    def run(self, show: Callable[[Sequence[Comparison]], None]) -> None:
        """Run all measurements. `show` gets the comparisons of each design. Raises UserError if a service fails."""
        given = self.given
        local = None
        if given.kv_tokens is None:
            local = self.characterize(str(self.model), LOCAL, given.budget, *self.engine)
            describe(LOCAL, local)
        capacity = given.kv_tokens if local is None else local.kv_capacity_tokens
        limits = [*self.limits, "--kv-capacity-tokens", str(capacity)]
        for design in DESIGNS:
            with served(self.model, [*design.flags, *self.engine]) as url:
                if design.colocated:
                    profile = self.characterize(url, SERVED, given.budget, *limits)
                    describe(SERVED, profile)
                    if local is not None:
                        ratios = (profile.times.seconds(*each) / local.times.seconds(*each) for each in BATCHES)
                        say(f"iterations {SERVED} / {LOCAL}: {median(ratios) - 1:+.1%} (median)")
                else:
                    self.characterize(url, SERVED, TRANSFER_S, *limits, "--disaggregated")
                show(self.compare(url, design))


def say(what: str) -> None:
    print(what, flush=True)


def describe(way: str, profile: MeasuredProfile) -> None:
    times = profile.times
    errors = {"prefill": times.prefill_error, "decode": times.decode_error, "mixed": times.mixed_error}
    say(f"held-out error {way}: " + ", ".join(f"{kind} {error:.1%}" for kind, error in errors.items() if error))


def table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table with simulated and measured latencies in ms, with a row for each rate."""
    first = comparisons[0]
    columns = [f"{metric.removesuffix('_s').upper()} {p.upper()}" for metric in METRICS for p in PERCENTILES]
    drawn = Table(
        "requests/s", "requests", "SLO attainment", *columns, title=f"{first.design}: simulated / measured, ms"
    )
    for each in comparisons:
        simulated, live = each.simulated[0], each.live[0]
        attained = f"{simulated.slo_attainment or 0:.1%} / {live.slo_attainment or 0:.1%}"
        cells = [
            f"{one:.4g} / {two:.4g} ({one / two - 1:+.0%})"
            for one, two in zip(values_ms(simulated), values_ms(live), strict=True)
        ]
        drawn.add_row(f"{each.rate:.3g}", str(each.requests), attained, *cells)
    return drawn


def values_ms(summary: Summary) -> list[float]:
    found: list[LatencyDistribution] = [getattr(summary, metric) for metric in METRICS]
    return [getattr(distribution, percentile) * 1e3 for distribution in found for percentile in PERCENTILES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: a model is created)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--kv", default="16GiB", help="KV cache of each worker")
    parser.add_argument("--kv-tokens", type=int, help="its size in tokens (default: characterize in process first)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each characterization")
    parser.add_argument("--workload", default="azure-conv")
    parser.add_argument("--longest", type=int, default=4096, help="clip requests to this many tokens")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--loads", type=float, nargs="+", default=(0.3, 0.6, 0.9), help="multiples of the goodput")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of arrivals at each rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the profiles in this directory")
    parser.add_argument("--json", type=Path, help="file for all comparisons, written after each design")
    given = parser.parse_args()
    console = Console(width=160)
    seen: list[Comparison] = []

    def show(comparisons: Sequence[Comparison]) -> None:
        seen.extend(comparisons)
        console.print(table(comparisons))
        if given.json is not None:
            given.json.write_text(json_text(seen), "utf-8")

    with tempfile.TemporaryDirectory(prefix="twofold-gpu-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        say(device_name(given.device))
        try:
            Benchmark(given, folder).run(show)
        except (UserError, subprocess.CalledProcessError) as error:
            sys.exit(f"{error}")


if __name__ == "__main__":
    main()
