"""Check predictions from a measured profile against measurements of a live service.

The script characterizes one instance of an engine on one CPU core. The engine is stock `vllm serve` over
HTTP, or Twofold's torch engine in process. With this profile, `twofold plan` plans a cluster of two
instances. The script then serves a disaggregated design and a colocated design, each with two instances.
AIPerf sends requests to each design at several rates. Each prediction is a simulation of the requests that
AIPerf sends.

Exits with 1 if the SLO attainment differs from the prediction by more than 5 points, or the median TTFT or
TPOT by more than 10%. AIPerf needs a separate Python environment: `pip install aiperf`.
"""

import argparse
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from characterized import MAX_MODEL_LEN, characterize, held_out, place, stock_vllm
from compared import TWOFOLD
from frame import model_directory, run_and_exit, say
from rich.console import Console
from started import Processes
from stock_vllm import HERE, SERVED_NAME

from twofold.bench.services import free_port
from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import ATTAINMENT_POINTS, MEDIAN, default_slo, knee
from twofold.fidelity.service import ServiceDesign, SimulatedEndpoint
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import MeasuredProfile, load_profile
from twofold.reporting.output import table
from twofold.request import Request
from twofold.slo import Slo
from twofold.workload.mooncake import MOONCAKE
from twofold.workload.source import workload
from twofold.workload.trace import write_trace

DESIGNS = (ServiceDesign(prefill=1, decode=1), ServiceDesign(colocated=2))
LONGEST = 1024  # tokens of the longest request
SEARCHED = 500  # requests
SETTLE_S = 900.0
WARM_UPS = 4  # vLLM's NIXL connector shakes hands with the first request


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """SLO attainment and median latencies in seconds, of a simulation or of a measurement."""

    attainment: float
    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, latencies: Sequence[tuple[float, float]], slo: Slo, sent: int) -> "Outcome":
        """Summarize (TTFT, TPOT) of the answered requests among `sent` requests."""
        kept = sum(ttft <= (slo.ttft_s or ttft) and tpot <= (slo.tpot_s or tpot) for ttft, tpot in latencies)
        ttft_s, tpot_s = np.median(np.array(latencies), axis=0).tolist()
        return cls(attainment=kept / sent, ttft_s=ttft_s, tpot_s=tpot_s)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and measured results of one design at one request rate."""

    design: str
    rate: float
    requests: int
    predicted: Outcome
    measured: Outcome

    def errors(self) -> tuple[float, float, float]:
        """Return the prediction errors: absolute for SLO attainment, relative for median TTFT and median TPOT."""
        said, found = self.predicted, self.measured
        return (said.attainment - found.attainment, said.ttft_s / found.ttft_s - 1, said.tpot_s / found.tpot_s - 1)

    def holds(self) -> bool:
        limits = (ATTAINMENT_POINTS, MEDIAN, MEDIAN)
        return all(abs(error) <= limit for error, limit in zip(self.errors(), limits, strict=True))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    engine: str
    slo: Slo
    held_out: dict[str, float | None]  # median relative error of the profile by kind of iteration
    plan: str
    points: list[Point]


class Loop:
    """Runs the steps with one engine. The steps keep their files in `folder`."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.model = model_directory(given.model, folder)
        self.stock = stock_vllm(self.model, folder, given.max_num_batched_tokens, needed=given.engine == "vllm")
        self.profile_path = given.profile or folder / f"{given.engine}.yaml"

    def characterize(self) -> MeasuredProfile:
        """Return the profile of one instance on one core; measure it unless --profile names it."""
        given = self.given
        if given.profile is not None:
            return load_profile(given.profile)
        engine = None if given.engine == "vllm" else given.engine
        return characterize(
            self.stock, engine, self.profile_path, given.budget, given.max_num_batched_tokens, self._run
        )

    def plan(self, slo: Slo) -> str:
        """Return the table of `twofold plan` for two instances of the profile."""
        limits = ["--slo", f"ttft={slo.ttft_s},tpot={slo.tpot_s}", "--max-machines", "2", "--router", "jsq"]
        lengths = ["--length-scale", str(self.given.length_scale), "--max-model-len", str(LONGEST)]
        command = [*TWOFOLD, "plan", self.given.workload, *lengths, "--profile", str(self.profile_path), *limits]
        return self._run(command)

    def requests(self, rate: float, seconds: float | None = None) -> list[Request]:
        """Return the requests of `seconds` seconds at a given rate, or 500 requests if `seconds` is None."""
        given = self.given
        return list(
            workload(
                given.workload,
                rate=rate,
                duration_s=seconds,
                num_requests=SEARCHED if seconds is None else None,
                arrival="poisson",
                seed=given.seed,
                length_scale=given.length_scale,
                max_model_len=LONGEST,
            )
        )

    def serve(self, design: ServiceDesign, processes: Processes) -> str:
        """Start the service of a design and return its URL."""
        port = free_port()
        if self.given.engine == "torch":
            flags = ["--max-num-batched-tokens", str(self.given.max_num_batched_tokens), *design.flags]
            command = ["serve", str(self.model), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), *flags]
        else:
            command = ["route", "--model", str(self.model), *self._servers(design, processes)]
        command += ["--served-model-name", SERVED_NAME, "--port", str(port)]
        processes.start("gateway", [*TWOFOLD, *command], {"OMP_NUM_THREADS": "1"})
        processes.wait(f"http://{HERE}:{port}/health")
        return f"http://{HERE}:{port}"

    def _servers(self, design: ServiceDesign, processes: Processes) -> list[str]:
        if design.colocated:
            urls = [self.stock.colocated(processes, place(core), threads=1) for core in range(design.colocated)]
            return [word for url in urls for word in ("--colocated", url)]
        prefill, decode = self.stock.pair(processes, (place(0), place(1)))
        return ["--prefill", f"http://{HERE}:{prefill}", "--decode", f"http://{HERE}:{decode}"]

    def measure(self, url: str, requests: Sequence[Request], slo: Slo) -> Outcome:
        """Send `requests` to the service with AIPerf. Raises ConfigurationError if AIPerf fails."""
        artifacts = self.folder / "aiperf"
        command = [str(self.given.aiperf), "profile", "--model", SERVED_NAME, "--url", url, "--ui", "none"]
        command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count"]
        command += ["--tokenizer", str(self.model.absolute()), "--artifact-dir", str(artifacts)]
        command += ["--input-file", str(self._trace(requests)), "--custom-dataset-type", "mooncake_trace"]
        command += [
            "--fixed-schedule",
            "--warmup-request-count",
            str(WARM_UPS),
            "--extra-inputs",
            "ignore_eos:true",
            "--extra-inputs",
            "temperature:0",
        ]
        self._run(command)
        records = (artifacts / "profile_export.jsonl").read_bytes().splitlines()
        found = [msgspec.json.decode(line, type=_Record) for line in records]  # without the warm-up
        return Outcome.of([each.latencies() for each in found if each.metrics is not None], slo, len(requests))

    def _trace(self, requests: Sequence[Request]) -> Path:
        path = self.folder / "trace.jsonl"
        write_trace(requests, path, MOONCAKE)
        return path

    def _run(self, command: Sequence[str]) -> str:
        log = self.folder / "step.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=SETTLE_S, check=False)
        text = log.read_text(errors="replace")
        if done.returncode:
            raise ConfigurationError(f"{' '.join(command[:6])} … failed: {text[-2000:]}")
        return text


class _Metric(msgspec.Struct):
    value: float


class _Metrics(msgspec.Struct):
    """Metrics of one request in AIPerf's `profile_export.jsonl`, in milliseconds."""

    time_to_first_token: _Metric
    inter_token_latency: _Metric  # (latency − TTFT) / (tokens − 1), the TPOT


class _Record(msgspec.Struct):
    metrics: _Metrics | None = None

    def latencies(self) -> tuple[float, float]:
        assert self.metrics is not None  # noqa: S101  (for the type checker)
        return self.metrics.time_to_first_token.value / 1e3, self.metrics.inter_token_latency.value / 1e3


def run(given: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Run the benchmark. Return the report, and the design and request rate of each prediction that does not hold."""
    loop = Loop(given, folder)
    say(f"characterizing {given.engine}")
    profile = loop.characterize()
    slo = default_slo(profile, loop.requests(1.0))
    say(f"planning for {slo}")
    report = Report(engine=given.engine, slo=slo, held_out=held_out(profile), plan=loop.plan(slo), points=[])
    for design in DESIGNS:
        twin = SimulatedEndpoint(design, loop.profile_path, profile.extend(load_catalog()))
        highest = knee(twin, loop.requests, slo)
        with Processes(folder) as processes:
            url = loop.serve(design, processes)
            for load in given.loads:
                requests = loop.requests(round(highest * load, 3), given.seconds)
                timelines = twin.timelines(requests)
                said = [(each.ttft_s or 0.0, each.tpot_s or 0.0) for each in timelines]
                point = Point(
                    design=design.name,
                    rate=round(highest * load, 3),
                    requests=len(requests),
                    predicted=Outcome.of(said, slo, len(requests)),
                    measured=loop.measure(url, requests, slo),
                )
                say(f"{design.name}, {point.rate:g}/s: " + ", ".join(f"{error:+.1%}" for error in point.errors()))
                report.points.append(point)
    given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    wrong = [f"{each.design} at {each.rate:g} requests/s" for each in report.points if not each.holds()]
    return report, wrong


def show(report: Report) -> None:
    console = Console(width=120)
    console.print(report.plan, markup=False)
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in report.held_out.items() if error is not None)
    console.print(f"held-out error of the profile: {errors}")
    title = f"{report.engine}: predicted / measured by AIPerf (SLO {report.slo})"
    headings = ("", "requests/s", "requests", "within SLO", "TTFT P50, s", "TPOT P50, ms")
    drawn = table(title, headings, range(1, 6))
    for each in report.points:
        said, found = each.predicted, each.measured
        drawn.add_row(
            each.design,
            f"{each.rate:g}",
            str(each.requests),
            f"{said.attainment:.1%} / {found.attainment:.1%}",
            f"{said.ttft_s:.3f} / {found.ttft_s:.3f}",
            f"{said.tpot_s * 1e3:.1f} / {found.tpot_s * 1e3:.1f}",
        )
    console.print(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, required=True, help="AIPerf's command")
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--profile", type=Path, help="profile of an earlier run (default: measure one)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds to characterize")
    parser.add_argument("--workload", default="azure-conv")
    parser.add_argument("--length-scale", type=float, default=0.25)
    parser.add_argument("--loads", type=float, nargs="+", default=(0.3, 0.6, 0.9), help="multiples of the goodput")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of arrivals at each rate")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep profile, logs and AIPerf's files in this directory")
    parser.add_argument("--json", type=Path, default=Path("loop.json"), help="all figures")
    given = parser.parse_args()
    run_and_exit("loop", partial(run, given), show, given.folder)


if __name__ == "__main__":
    main()
