"""Check predictions from a measured profile against measurements of a live service.

The script characterizes one instance on one CPU core. With this profile, `twofold plan` plans a cluster of
two instances. The script then serves a colocated design and a disaggregated design, each with two instances.
AIPerf sends requests to each design at several rates. Each prediction is a simulation of the requests that
AIPerf sends, at the speed of the host that a few requests to the idle service measure before and after each load. A
load during which this speed changes by more than 10% is sent again.

With --engine torch, `twofold serve` serves both designs. With --engine vllm, the colocated design is
`twofold route` in front of two stock `vllm serve`. The disaggregated design is `twofold serve --engine vllm`:
vLLM's own NIXL connector pins threads of every instance on a CPU to the machine's last core, so that two
instances share it. Each instance is measured as it is served, over HTTP, with the client on the second core.

The profile is measured with Twofold's own client. AIPerf records first tokens later, and takes time of the same cores.
A few requests to the idle service measure both, and the simulation includes them. As in the simulation, clients run
on the gateway's cores. Without --aiperf, Twofold's own client sends the requests.

Exits with 1 if the SLO attainment differs from the prediction by more than 5 points, or the median TTFT or
TPOT by more than 10%. AIPerf needs a separate Python environment: `pip install aiperf`.
"""

import argparse
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import psutil
from aiperf_client import SETTLE_S, AIPerf
from characterized import CORES, MAX_MODEL_LEN, characterize, held_out, place, stock_vllm
from compared import TWOFOLD
from frame import model_directory, run_and_exit, say
from rich.console import Console
from started import Processes
from stock_vllm import HERE, SERVED_NAME

from twofold.bench.services import free_port
from twofold.characterize.contention import with_contention
from twofold.characterize.endpoint import EndpointTarget
from twofold.characterize.sweep import measured_slowness
from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import (
    ATTAINMENT,
    Comparison,
    OfferedLoad,
    compare_endpoint,
    default_slo,
    fidelity_table,
    knee,
    replay_on,
)
from twofold.fidelity.service import ServiceDesign, SimulatedEndpoint, clients_beside
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import MeasuredProfile, load_profile
from twofold.reporting.output import json_text
from twofold.request import Request
from twofold.slo import Slo
from twofold.timeline import Timeline
from twofold.workload.source import workload

DESIGNS = (ServiceDesign(colocated=2), ServiceDesign(prefill=1, decode=1))
# 65 million parameters: with fewer, AIPerf and the gateway take much of the two cores.
MODEL = ("--hidden-size", "640", "--layers", "10", "--heads", "10", "--kv-heads", "5", "--vocab-size", "16384")
STOCK = "stock"
LONGEST = 1024  # tokens of the longest request
SEARCHED = 500  # requests
WARM_UPS = 8
PASSES = 9  # of the probes before and after each load
KV_TOKENS = 40_000  # of 1 GiB: 26 kB for a token
CHECKED = (ATTAINMENT, "TTFT P50", "TPOT P50")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    engine: str
    slo: Slo
    held_out: dict[str, dict[str, float | None]]  # median relative error by profile and kind of iteration
    plan: str
    comparisons: list[Comparison]


class Loop:
    """Runs the steps with one engine. The steps keep their files in `folder`."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.model = model_directory(given.model, folder, *MODEL)
        self.stock = stock_vllm(self.model, folder, given.max_num_batched_tokens, needed=given.engine == "vllm")
        self._aiperf = None if given.aiperf is None else AIPerf(given.aiperf, self.model, folder)

    def instance(self, design: ServiceDesign) -> str:
        """Return the name of the instances of a design: an engine of Twofold's workers, or `stock`."""
        return STOCK if self.given.engine == "vllm" and design.colocated else self.given.engine

    def path(self, instance: str) -> Path:
        return self.folder / f"{instance}.yaml"

    def characterize(self, instance: str) -> MeasuredProfile:
        """Return the profile of one instance on one core; measure it unless the folder has it."""
        given, path = self.given, self.path(instance)
        if path.exists():
            return load_profile(path)
        say(f"characterizing {instance}")
        flags = ["--budget", str(given.budget), "--max-num-batched-tokens", str(given.max_num_batched_tokens)]
        with Processes(self.folder) as processes:
            if instance == STOCK:
                url = self.stock.colocated(processes, place(0), threads=1)
            else:
                url = self._twofold(processes, self._serve(ServiceDesign(colocated=1)))
                pin_worker(processes.pid("gateway"))
                flags += ["--kv-capacity-tokens", str(KV_TOKENS)]
            return characterize(url, path, 1, *flags, run=self._run)

    def plan(self, instances: Sequence[str], slo: Slo) -> str:
        """Return the table of `twofold plan` for two instances with these profiles."""
        limits = ["--slo", f"ttft={slo.ttft_s},tpot={slo.tpot_s}", "--max-machines", "2", "--router", "jsq"]
        lengths = ["--length-scale", str(self.given.length_scale), "--max-model-len", str(LONGEST)]
        profiles = [word for instance in instances for word in ("--profile", str(self.path(instance)))]
        return self._run([*TWOFOLD, "plan", self.given.workload, *lengths, *profiles, *limits])

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
        if self.given.engine == "vllm" and design.colocated:
            cores = range(design.colocated)
            urls = [self.stock.colocated(processes, place(core), threads=1, name=f"colocated-{core}") for core in cores]
            servers = [word for url in urls for word in ("--colocated", url)]
            return self._twofold(processes, ["route", "--model", str(self.model), *servers])
        return self._twofold(processes, self._serve(design))

    def _serve(self, design: ServiceDesign) -> list[str]:
        flags = ["--max-num-batched-tokens", str(self.given.max_num_batched_tokens), *design.flags]
        flags += ["--engine", self.given.engine, "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
        flags += ["--kv-cache-memory-bytes", "1GiB"]
        return ["serve", str(self.model), *flags]

    def _twofold(self, processes: Processes, command: Sequence[str]) -> str:
        port = free_port()
        flags = ["--served-model-name", SERVED_NAME, "--port", str(port)]
        environment = {**self.stock.environment, "OMP_NUM_THREADS": "1"}
        processes.start("gateway", [*TWOFOLD, *command, *flags], environment)
        processes.wait(f"http://{HERE}:{port}/health")
        return f"http://{HERE}:{port}"

    def load(self, url: str, load: OfferedLoad) -> list[Timeline]:
        """Send the requests of `load` to the service. Raises ConfigurationError on failure."""
        if self._aiperf is None:
            return replay_on(url, load)
        return self._aiperf.send(url, load.requests)

    def with_client(self, url: str, profile: MeasuredProfile) -> MeasuredProfile:
        """Measure what AIPerf adds to the times of an idle service, and return a profile that includes it."""
        if self._aiperf is None:
            return profile
        times = self._aiperf.times(url)
        say(
            f"AIPerf adds {_ms(times.delay_s)} to a first token, {_ms(times.request_s)} of CPU time to a request, "
            f"and {_ms(times.token_s)} to a token"
        )
        return times.extend(profile)

    def _run(self, command: Sequence[str]) -> str:
        log = self.folder / "step.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=SETTLE_S, check=False)
        text = log.read_text(errors="replace")
        if done.returncode:
            raise ConfigurationError(f"{' '.join(command[:6])} … failed: {text[-2000:]}")
        return text


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def pin_worker(gateway: int) -> None:
    """Pin a service's worker to the first core, as in a service of two workers, and all else to the second core."""
    service = psutil.Process(gateway)
    for process in (service, *service.children(recursive=True)):
        core = CORES[0 if process.name().startswith("mixed") else 1]
        for thread in process.threads():
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread.id, {core})


def run(given: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Run the benchmark. Return the report, and the design and request rate of each prediction that does not hold."""
    loop = Loop(given, folder)
    designs = [design for design in DESIGNS if design.name in given.designs]
    instances = list(dict.fromkeys(map(loop.instance, reversed(designs))))  # the first to be served was measured last
    profiles = {instance: loop.characterize(instance) for instance in instances}
    slo = default_slo(profiles[loop.instance(designs[0])], loop.requests(1.0))
    say(f"planning for {slo}")
    errors = {instance: held_out(profile) for instance, profile in profiles.items()}
    report = Report(engine=given.engine, slo=slo, held_out=errors, plan=loop.plan(instances, slo), comparisons=[])
    for design in designs:
        instance = loop.instance(design)
        with ExitStack() as stack:
            url = loop.serve(design, stack.enter_context(Processes(folder)))
            stack.enter_context(clients_beside(design))
            replay_on(url, OfferedLoad(requests=loop.requests(1.0)[:WARM_UPS]))
            target = EndpointTarget(url, max_num_batched_tokens=given.max_num_batched_tokens)
            alone = profiles[instance]
            contended = with_contention(alone, target, design.counts)
            prefill, decode = contended.shared_host.prefill, contended.shared_host.decode
            say(f"{design.name}: contention x{prefill.crowded:.2f} with prompts, x{decode.crowded:.2f} without")
            profile = loop.with_client(url, contended)
            twin = SimulatedEndpoint(design, profile, folder, profile.extend(load_catalog()))
            highest = knee(twin, loop.requests, slo)
            rates = [round(highest * load, 3) for load in given.loads]
            # With fewer requests, one of them moves the attainment by more than its limit.
            lasts = [max(given.seconds, given.requests / rate) for rate in rates]
            loads = [
                OfferedLoad(requests=loop.requests(rate, seconds), rate=rate)
                for rate, seconds in zip(rates, lasts, strict=True)
            ]
            report.comparisons.extend(
                compare_endpoint(
                    partial(loop.load, url),
                    twin,
                    loads,
                    slo=slo,
                    replays=given.replays,
                    on_load=say,
                    slowdowns=partial(measured_slowness, target, alone, PASSES),
                    tries=given.tries,
                )
            )
    given.json.write_text(json_text(report), "utf-8")
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
    for instance, found in report.held_out.items():
        errors = ", ".join(f"{kind} {error:.1%}" for kind, error in found.items() if error is not None)
        console.print(f"held-out error of the profile of {instance}: {errors}")
    for design in DESIGNS:
        compared = [each for each in report.comparisons if each.design == design.name]
        if compared:
            console.print(fidelity_table(compared))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, help="AIPerf's command (default: requests come from twofold's client)")
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds to characterize an instance")
    parser.add_argument("--workload", default="azure-conv")
    parser.add_argument("--length-scale", type=float, default=0.25)
    parser.add_argument("--loads", type=float, nargs="+", default=(0.3, 0.6, 0.9), help="multiples of the goodput")
    names = [design.name for design in DESIGNS]
    parser.add_argument("--designs", nargs="+", choices=names, default=names, help="designs to serve")
    parser.add_argument("--replays", type=int, default=1, help="measurements at each rate")
    parser.add_argument("--tries", type=int, default=3, help="most loads for one measurement on a steady host")
    parser.add_argument("--seconds", type=float, default=60.0, help="least seconds of arrivals at each rate")
    parser.add_argument("--requests", type=int, default=60, help="least number of requests at each rate")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep profiles, logs and AIPerf's files here; profiles are reused")
    parser.add_argument("--json", type=Path, default=Path("loop.json"), help="all figures")
    given = parser.parse_args()
    run_and_exit("loop", partial(run, given), show, given.folder)


if __name__ == "__main__":
    main()
