"""Demo: compare disaggregated and colocated serving of one model under the same load."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from objectives import Objectives, objectives, probe_requests, verdict
from twofold.bench.endpoint import discover
from twofold.bench.load import LoadConfig, LoadResult, run_load
from twofold.bench.real_data import find_data
from twofold.bench.services import served
from twofold.cli.progress import load_progress
from twofold.errors import UserError
from twofold.reporting.summary import Summary, comparison_table, summarize
from twofold.request import Request
from twofold.workload.source import workload

DESIGNS = {"split 1P+1D": ("--prefill", "1", "--decode", "1"), "colocated 2": ("--colocated", "2")}
MODEL_DIR = Path(".demo/model")
TRACE = "traces/azure-2023-conv.csv"
# At a quarter of the real lengths, a laptop core takes about as long for a prompt of the demo model as a GPU takes for
# a full prompt of a real model, and queues form at rates that a laptop can serve.
LENGTH_SCALE = 0.25
MAX_LEN = 2048
REQUESTS = 100
FLAGS = ("--kv-cache-memory-bytes", "1GiB", "--no-enable-prefix-caching")  # the demo repeats some prompts

console = Console()


def main() -> None:
    """Create a model, serve it split and colocated, and print the comparison."""
    try:
        _demonstrate()
    except UserError as error:
        sys.exit(f"twofold: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _demonstrate() -> None:
    _make_model()
    trace = find_data(TRACE)
    source = str(trace) if trace else "the azure-conv generator (trace file not found)"
    console.print(f"Workload: {REQUESTS} requests of {source}; lengths × {LENGTH_SCALE}.")
    runs: dict[str, Summary] = {}
    goal: Objectives | None = None
    for name, flags in DESIGNS.items():
        console.print(f"\n[bold]{name}[/bold]: twofold serve {MODEL_DIR} {' '.join(flags)}")
        started = time.monotonic()
        with served(MODEL_DIR, (*flags, *FLAGS)) as url:
            console.print(f"  ready after {time.monotonic() - started:.0f} s")
            if goal is None:
                goal = _probe(url, trace)
            result = _load(url, list(_requests(trace, goal.rate)), warmup=2)
        runs[name] = summarize(result.timelines, duration_s=result.duration_s, slo=goal.slo, errors=result.errors)
        console.print(f"  {runs[name].completed} requests served in {result.duration_s:.0f} s")
    cores = len(os.sched_getaffinity(0))
    console.print(comparison_table(runs, title=f"The same model and requests on the same {cores} cores"))
    console.print(f"[bold]{verdict(*runs.items())}[/bold]")


def _make_model() -> None:
    if not (MODEL_DIR / "config.json").is_file():
        console.print(f"Creating a small Llama model with seeded weights and its own tokenizer in {MODEL_DIR} …")
        from twofold.engine.model_factory import create_model  # noqa: PLC0415  (imports torch, which only this step needs)

        making = MODEL_DIR.with_name("model.part")  # an interrupted run leaves no partial model
        create_model(making, force=True)
        making.rename(MODEL_DIR)


def _probe(url: str, trace: Path | None) -> Objectives:
    sample = list(_requests(trace, rate=1.0))
    alone = _load(url, probe_requests(sample), warmup=1, max_concurrency=1)
    goal = objectives(alone.timelines)
    console.print(f"  {goal.describe()}")
    return goal


def _requests(trace: Path | None, rate: float) -> Iterator[Request]:
    spec, arrival = (str(trace), "trace") if trace else ("azure-conv", "poisson")
    return workload(
        spec, rate=rate, num_requests=REQUESTS, arrival=arrival, length_scale=LENGTH_SCALE, max_model_len=MAX_LEN
    )


def _load(url: str, requests: list[Request], *, warmup: int, max_concurrency: int | None = None) -> LoadResult:
    async def load() -> LoadResult:
        config = LoadConfig(endpoint=await discover(url), warmup=warmup, max_concurrency=max_concurrency)
        with load_progress(len(requests)) as on_change:
            return await run_load(config, requests, on_change=on_change)

    return asyncio.run(load())


if __name__ == "__main__":
    main()
