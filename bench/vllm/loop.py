"""Check predictions from a measured profile against measurements of a live service.

The script characterizes one instance of an engine on one CPU core. The engine is stock `vllm serve` over
HTTP, or Twofold's torch engine in process. With this profile, `twofold plan` plans a cluster of two
instances. The script then serves a disaggregated design and a colocated design, each with two instances.
AIPerf sends requests to each design at several rates. Each prediction is a simulation of the requests that
AIPerf sends.

With vLLM, the colocated design is `twofold route` in front of two stock servers. The disaggregated design is
`twofold serve --engine vllm`, because vLLM's NIXL connector pins the threads of every instance on a CPU to
the machine's last core, so that two instances share it.

Exits with 1 if the SLO attainment differs from the prediction by more than 5 points, or the median TTFT or
TPOT by more than 10%. AIPerf needs a separate Python environment: `pip install aiperf`.
"""

import argparse
import os
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from characterized import MAX_MODEL_LEN, characterize, held_out, place, stock_vllm
from compared import TWOFOLD
from frame import model_directory, run_and_exit, say
from rich.console import Console
from started import Processes
from stock_vllm import HERE, SERVED_NAME

from twofold.bench.services import free_port
from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import (
    ATTAINMENT,
    Comparison,
    compare_endpoint,
    default_slo,
    fidelity_table,
    knee,
    replay_on,
)
from twofold.fidelity.service import ServiceDesign, SimulatedEndpoint
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import MeasuredProfile, load_profile
from twofold.request import FinishReason, Request
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline
from twofold.workload.mooncake import MOONCAKE
from twofold.workload.source import workload
from twofold.workload.trace import write_trace

DESIGNS = (ServiceDesign(prefill=1, decode=1), ServiceDesign(colocated=2))
# 135 million parameters: with fewer, clients and gateway take much of the two cores.
MODEL = ("--hidden-size", "768", "--layers", "12", "--heads", "12", "--vocab-size", "32768")
LONGEST = 1024  # tokens of the longest request
SEARCHED = 500  # requests
SETTLE_S = 900.0
WARM_UPS = 8
CHECKED = (ATTAINMENT, "TTFT P50", "TPOT P50")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    engine: str
    slo: Slo
    held_out: dict[str, float | None]  # median relative error of the profile by kind of iteration
    plan: str
    comparisons: list[Comparison]


class Loop:
    """Runs the steps with one engine. The steps keep their files in `folder`."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.model = model_directory(given.model, folder, *MODEL)
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
        if self.given.engine == "vllm" and design.colocated:
            cores = range(design.colocated)
            urls = [self.stock.colocated(processes, place(core), threads=1, name=f"colocated-{core}") for core in cores]
            servers = [word for url in urls for word in ("--colocated", url)]
            command = ["route", "--model", str(self.model), *servers]
        else:
            flags = ["--max-num-batched-tokens", str(self.given.max_num_batched_tokens), *design.flags]
            flags += ["--engine", self.given.engine, "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
            command = ["serve", str(self.model), *flags]
        command += ["--served-model-name", SERVED_NAME, "--port", str(port)]
        processes.start("gateway", [*TWOFOLD, *command], {**self.stock.environment, "OMP_NUM_THREADS": "1"})
        processes.wait(f"http://{HERE}:{port}/health")
        return f"http://{HERE}:{port}"

    def load(self, url: str, requests: Sequence[Request]) -> list[Timeline]:
        """Send `requests` to the service with AIPerf, at their arrival times. Raises ConfigurationError on failure."""
        artifacts = self.folder / "aiperf"
        # AIPerf shares the two cores with the service: it runs at a low priority, without monitors of its own.
        command = [
            "nice",
            "-n",
            "19",
            str(self.given.aiperf),
            "profile",
            "--model",
            SERVED_NAME,
            "--url",
            url,
            "--ui",
            "none",
        ]
        command += ["--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1", "--record-processors", "1"]
        command += ["--stats-interval", "0"]
        command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count"]
        command += ["--tokenizer", str(self.model.absolute()), "--artifact-dir", str(artifacts)]
        command += ["--input-file", str(self._trace(requests)), "--custom-dataset-type", "mooncake_trace"]
        command += ["--fixed-schedule", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
        self._run(command)
        records = (artifacts / "profile_export.jsonl").read_bytes().splitlines()
        if len(records) != len(requests):
            raise ConfigurationError(f"AIPerf has results of {len(records)} of {len(requests)} requests")
        return [msgspec.json.decode(line, type=_Record).timeline() for line in records]

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
    """Metrics of one request in AIPerf's `profile_export.jsonl`; times in milliseconds."""

    time_to_first_token: _Metric
    request_latency: _Metric
    input_sequence_length: _Metric
    output_sequence_length: _Metric


class _Metadata(msgspec.Struct):
    request_start_ns: int


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: _Metrics | None = None

    def timeline(self) -> Timeline:
        """Return the timeline of the request. Raises ConfigurationError if the request failed."""
        found, start_s = self.metrics, self.metadata.request_start_ns / 1e9
        if found is None:
            raise ConfigurationError("a request of AIPerf failed: see profile_export.jsonl")
        prompt, output = (int(each.value) for each in (found.input_sequence_length, found.output_sequence_length))
        return Timeline(
            request=Request(id=f"{start_s}", arrival_s=start_s, prompt_tokens=prompt, output_tokens=output),
            moments={
                Moment.ARRIVED: start_s,
                Moment.FIRST_TOKEN: start_s + found.time_to_first_token.value / 1e3,
                Moment.LAST_TOKEN: start_s + found.request_latency.value / 1e3,
            },
            output_tokens=output,
            finish_reason=FinishReason.LENGTH,
        )


def run(given: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Run the benchmark. Return the report, and the design and request rate of each prediction that does not hold."""
    loop = Loop(given, folder)
    say(f"characterizing {given.engine}")
    profile = loop.characterize()
    slo = default_slo(profile, loop.requests(1.0))
    say(f"planning for {slo}")
    report = Report(engine=given.engine, slo=slo, held_out=held_out(profile), plan=loop.plan(slo), comparisons=[])
    for design in DESIGNS:
        twin = SimulatedEndpoint(design, loop.profile_path, profile.extend(load_catalog()))
        highest = knee(twin, loop.requests, slo)
        rates = [round(highest * load, 3) for load in given.loads]
        loads = {rate: loop.requests(rate, given.seconds) for rate in rates}
        with Processes(folder) as processes:
            url = loop.serve(design, processes)
            replay_on(url, loop.requests(rates[0])[:WARM_UPS])
            send = partial(loop.load, url)
            report.comparisons.extend(compare_endpoint(send, twin, loads, slo=slo, replays=given.replays, on_load=say))
    given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return report, list(failures(report))


def failures(report: Report) -> Iterator[str]:
    """Yield a sentence for each figure that differs from its prediction by more than its limit."""
    for comparison in report.comparisons:
        for figure in comparison.figures():
            if figure.name in CHECKED and abs(figure.error) > figure.limit:
                yield f"{comparison.design} at {comparison.rate:g} requests/s: {figure.name} {figure.error:+.1%}"


def show(report: Report) -> None:
    console = Console(width=120)
    console.print(report.plan, markup=False)
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in report.held_out.items() if error is not None)
    console.print(f"{report.engine}: held-out error of the profile: {errors}; live results are AIPerf's")
    for design in DESIGNS:
        console.print(fidelity_table([each for each in report.comparisons if each.design == design.name]))


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
    parser.add_argument("--replays", type=int, default=1, help="measurements at each rate")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of arrivals at each rate")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep profile, logs and AIPerf's files in this directory")
    parser.add_argument("--json", type=Path, default=Path("loop.json"), help="all figures")
    given = parser.parse_args()
    run_and_exit("loop", partial(run, given), show, given.folder)


if __name__ == "__main__":
    main()
