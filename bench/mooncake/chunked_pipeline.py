"""Measure how chunked pipeline prefill changes the TTFT of long and short prompts.

    OMP_NUM_THREADS=1 python bench/mooncake/chunked_pipeline.py [--model DIR] [--long 6144] [--short 512] [--chunk 768]

Three live services and their simulations get the same prompts: with one pipeline stage, with two stages, and
with two stages and chunks. A stage is a process with one thread, so the host needs two idle cores. The
simulator uses iteration times measured on this host. Prints TTFTs relative to the service with one stage.

The exit status is 0 if all of the following are true, and 1 otherwise:

- With two stages and chunks, the TTFT of long prompts is lower than with one stage, live and simulated.
- With two stages and chunks, the TTFT of short prompts is at most 5% higher than with one stage, live and
  simulated.
- The live and the simulated TTFT of every service differ by at most 15%.
"""

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.client import Client, ClientConfig
from twofold.bench.endpoint import discover
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import served
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.cluster.timing import Timing
from twofold.engine.base import SequenceStep
from twofold.events import Recorder
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.performance.fitting.iterations import IterationWork, Measurement, fit_iterations
from twofold.performance.instance import LayersStage, Pipeline
from twofold.performance.profile import IterationTimes, MeasuredModel
from twofold.reporting.output import json_text
from twofold.request import Request
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import build_cluster
from twofold.simulation.statistics import RunStatistics
from twofold.timeline import Timeline

if TYPE_CHECKING:
    from twofold.engine.torch.engine import TorchEngine

ONE, TWO, CHUNKED = "1 stage", "2 stages", "2 stages, chunks"
BLOCK = 16
CONTEXTS = (0, 512, 1536, 3072, 5120)
TOKENS = (16, 64, 192, 320, 512, 768, 1024)
SHORT, APART = 1.05, 0.15


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the benchmark: lengths in tokens, numbers of prompts, and bandwidth between two stages."""

    long: int
    short: int
    chunk: int
    rounds: int
    shorts: int
    boundary_gb_per_s: float


class Ttft(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT of a long and of a short prompt: in seconds, and as a ratio to the TTFT of the one-stage service."""

    long_s: float
    short_s: float
    long_ratio: float
    short_ratio: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Live and simulated TTFT by service, and the measured iteration times of the engine."""

    setting: Setting
    live: dict[str, Ttft]
    simulated: dict[str, Ttft]
    alone: IterationTimes
    crowded: IterationTimes


# -- live -----------------------------------------------------------------------------------------------------------


async def live(urls: Mapping[str, str], setting: Setting, engine: "Engine") -> dict[str, Ttft]:
    """Measure the live TTFT of every service, alternating between them."""
    async with AsyncExitStack() as stack:
        services = [await stack.enter_async_context(MeasuredService.service(name, url)) for name, url in urls.items()]
        for number in range(setting.rounds + 1):
            for index, length in enumerate([setting.long] + [setting.short] * setting.shorts):
                turn = (number + index) % len(services)
                for service in services[turn:] + services[:turn]:
                    seconds = await service.ttft_s(f"{number}/{index}", length)
                    if number:
                        (service.shorts_s if index else service.longs_s).append(seconds)
            if number:
                engine.run()
                sentences = (f"{each.name}: {each.longs_s[-1]:.3f} s" for each in services)
                print(f"round {number}, long prompt: {', '.join(sentences)}", flush=True)
    one = services[0]
    return {
        each.name: Ttft(
            long_s=statistics.median(each.longs_s),
            short_s=statistics.median(each.shorts_s),
            long_ratio=paired(each.longs_s, one.longs_s),
            short_ratio=paired(each.shorts_s, one.shorts_s),
        )
        for each in services
    }


def paired(seconds: Sequence[float], of: Sequence[float]) -> float:
    """Return the median ratio of corresponding values in two sequences."""
    return statistics.median(mine / other for mine, other in zip(seconds, of, strict=True))


class MeasuredService:
    """Client of one service, with the TTFTs of its long and short prompts."""

    def __init__(self, name: str, client: Client, prompts: PromptMaker, timelines: list[Timeline]) -> None:
        self.name = name
        self.longs_s: list[float] = []
        self.shorts_s: list[float] = []
        self._client, self._prompts, self._timelines = client, prompts, timelines

    @classmethod
    @asynccontextmanager
    async def service(cls, name: str, url: str) -> AsyncIterator["MeasuredService"]:
        endpoint, timelines = await discover(url), list[Timeline]()
        lowest, vocabulary = token_range(endpoint.vocab_size)
        async with Client(endpoint, Recorder([timelines.append]), ClientConfig()) as client:
            yield cls(name, client, PromptMaker(lowest=lowest, vocabulary=vocabulary), timelines)

    async def ttft_s(self, name: str, prompt_tokens: int) -> float:
        """Send a new, uncached prompt to the idle service. Return its TTFT in seconds."""
        asked = request(name, prompt_tokens)
        outcome = await self._client.send(asked, self._client.body(asked, self._prompts.prompt(asked)))
        if outcome.error is not None:
            raise RuntimeError(f"{self.name}: {outcome.error}: {outcome.detail}")
        return self._timelines.pop().ttft_s or 0.0


def request(name: str, prompt_tokens: int) -> Request:
    """Return a request for one output token."""
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=1)


# -- simulated ------------------------------------------------------------------------------------------------------


class FirstTokens(Observer):
    """Observer that collects the TTFT of finished requests."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self.ttft_s.append(timeline.ttft_s or 0.0)


def simulated(times: IterationTimes, token_s: float, stages: int, chunk: int | None, prompt: int) -> float:
    """Return the simulated TTFT in seconds of one prompt on a pipeline of `stages` stages."""
    whole = MeasuredModel("the engine", times)
    first, later = LayersStage(whole, 1 / stages, 0.0), LayersStage(whole, 1 / stages, token_s)
    spec = ClusterSpec(
        pools=(
            PoolSpec(
                machines=1,
                machine="dgx-a100",
                role=Role.PREFILL,
                tensor_parallel=1,
                pipeline_parallel=stages,
                instances=1,
            ),
            PoolSpec(machines=1, machine="dgx-a100", role=Role.DECODE, tensor_parallel=1),
        ),
        model="llama-3.1-8b",
        router="jsq",
        handoff="serialized",
        max_num_batched_tokens=2048,
        pipeline_chunk=chunk,
    )
    prefill, decode = instance_profiles(spec, load_catalog())
    model = Pipeline("the stages", whole.error, first, later, stages)
    kinds = [replace(prefill, model=model, timing=Timing(model)), decode]
    seen = FirstTokens()
    nothing = RunStatistics(None, None, over_all_tokens=False)
    cluster = build_cluster(spec, load_catalog(), kinds, nothing, [seen], 1 << 60)
    cluster.feed([request("0", prompt)])
    cluster.kernel.run(until_events=1 << 60)
    return seen.ttft_s[0]


def simulate_all(
    setting: Setting, alone: IterationTimes, crowded: IterationTimes, hidden_bytes: int, besides_s: float
) -> dict[str, Ttft]:
    token_s = hidden_bytes / (setting.boundary_gb_per_s * 1e9)
    ways = {ONE: (alone, 1, None), TWO: (alone, 2, None), CHUNKED: (crowded, 2, setting.chunk)}
    seconds = {}
    for name, (times, stages, chunk) in ways.items():
        # An unchunked prompt occupies one stage at a time.
        short = alone if setting.short <= setting.chunk else times
        seconds[name] = (
            besides_s + simulated(times, token_s, stages, chunk, setting.long),
            besides_s + simulated(short, token_s, stages, chunk, setting.short),
        )
    one_long_s, one_short_s = seconds[ONE]
    return {
        name: Ttft(long_s=long_s, short_s=short_s, long_ratio=long_s / one_long_s, short_ratio=short_s / one_short_s)
        for name, (long_s, short_s) in seconds.items()
    }


# -- the engine -----------------------------------------------------------------------------------------------------


def measure_engine(directory: Path, longest: int) -> list[Measurement]:
    """Time prefill iterations with several lengths and contexts on one CPU thread. Each time is a median of three."""
    engine, made = make_engine(directory, longest), list[Measurement]()
    for tokens, context in [*cells(longest), (longest // 2, 0), (longest, 0)]:
        step = new_step(tokens, context)
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            engine.run([step])
            taken.append(time.perf_counter() - began)
        work = IterationWork(tokens, squares=tokens * (tokens + 2 * context))
        made.append(Measurement(work=(work,), seconds=statistics.median(taken)))
    return made


def make_engine(directory: Path, longest: int) -> "TorchEngine":
    """Create an engine on one thread, with KV memory for one prompt of `longest` tokens."""
    import torch  # noqa: PLC0415  (imported in measuring processes only)

    from twofold.engine.torch.engine import TorchEngine  # noqa: PLC0415
    from twofold.engine.torch.loader import load_model  # noqa: PLC0415
    from twofold.engine.torch.pool import KvPool  # noqa: PLC0415

    torch.set_num_threads(1)
    loaded = load_model(str(directory))
    return TorchEngine(loaded, KvPool(loaded.layout(BLOCK), blocks_of(longest)))


def new_step(tokens: int, context: int) -> SequenceStep:
    return SequenceStep("a", [7] * tokens, context, list(range(blocks_of(tokens + context))), None)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def cells(longest: int) -> list[tuple[int, int]]:
    return [(tokens, context) for context in CONTEXTS for tokens in TOKENS if tokens + context <= longest]


class Engine:
    """Torch engine in its own process, to time the prefill of a long prompt."""

    def __init__(self, directory: Path, longest: int) -> None:
        self.seconds: list[float] = []
        self._process = subprocess.Popen(
            engine_command("--run-engine", directory, longest), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self) -> None:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None  # noqa: S101  (created with pipes; for the type checker)
        assert answers is not None  # noqa: S101
        asked.write(b"\n")
        asked.flush()
        self.seconds.append(float(answers.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def run_engine(directory: Path, longest: int) -> None:
    """Prefill a prompt of `longest` tokens for each line on stdin, and print the seconds."""
    step = new_step(longest, 0)
    engine = make_engine(directory, longest)
    for _ in sys.stdin:
        began = time.perf_counter()
        engine.run([step])
        print(time.perf_counter() - began, flush=True)


def engine_command(what: str, directory: Path, longest: int) -> list[str]:
    return [sys.executable, __file__, what, "--model", str(directory), "--long", str(longest)]


def engine_times(directory: Path, longest: int, processes: int) -> IterationTimes:
    """Return the iteration times of one engine, measured while `processes` engines run concurrently."""
    command = engine_command("--measure-engine", directory, longest)
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    sentences = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("measuring the engine failed")
    return fit_iterations(msgspec.json.decode(sentences[0], type=list[Measurement])).times


# -- report ---------------------------------------------------------------------------------------------------------


def table(report: Report) -> Table:
    """Return a table of each service's live and simulated TTFT, relative to the service with one stage."""
    setting = report.setting
    drawn = Table(title=f"TTFT relative to {ONE}, chunks of {setting.chunk:,} tokens", title_justify="left")
    for heading in ("prompt", "service", "live", "simulated", "live / simulated", "live, seconds", "simulated"):
        drawn.add_column(heading, justify="left" if heading in ("prompt", "service") else "right")
    for what, tokens in (("long", setting.long), ("short", setting.short)):
        for name in (ONE, TWO, CHUNKED):
            worlds = report.live[name], report.simulated[name]
            ours, theirs = (getattr(ttft, f"{what}_s") for ttft in worlds)
            one, other = (getattr(ttft, f"{what}_ratio") for ttft in worlds)
            cells_ = (f"{one:.3f}", f"{other:.3f}", f"{one / other:.3f}", f"{ours:.3f}", f"{theirs:.3f}")
            drawn.add_row(f"{tokens:,}", name, *cells_)
    return drawn


def verdict(report: Report) -> tuple[list[str], bool]:
    """Return the measured TTFT ratios and errors as sentences, and whether all are within their bounds."""
    sentences, holds = [], True
    for world, ttft in (("live", report.live), ("simulated", report.simulated)):
        long, short = ttft[CHUNKED].long_ratio, ttft[CHUNKED].short_ratio
        sentences.append(f"{world}: a long prompt takes {long:.2f} of one stage's time (less is better)")
        sentences.append(f"{world}: a short prompt takes {short:.2f} of it (at most {SHORT:.2f} expected)")
        holds = holds and long < 1.0 and short <= SHORT
    apart = max(
        abs(getattr(report.live[name], what) / getattr(report.simulated[name], what) - 1)
        for name in report.live
        for what in ("long_s", "short_s")
    )
    sentences.append(f"live and simulated seconds differ by at most {apart:.0%} (at most {APART:.0%} expected)")
    return sentences, holds and apart <= APART


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--long", type=int, default=6144)
    parser.add_argument("--short", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shorts", type=int, default=12, help="short prompts per long one")
    parser.add_argument("--boundary-gb-per-s", type=float, default=1.5)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--measure-engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run-engine", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.measure_engine:
        sys.stdout.buffer.write(msgspec.json.encode(measure_engine(given.model, given.long)))
        return 0
    if given.run_engine:
        run_engine(given.model, given.long)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the services
    setting = Setting(**{name: getattr(given, name) for name in Setting.__struct_fields__})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-chunks-")))
        model = given.model or made_model(folder / "model", setting)
        # Concurrent stages share memory bandwidth, so they get the times of an engine beside a second process.
        alone, crowded = (engine_times(model, setting.long, processes) for processes in (1, 2))
        urls = {name: stack.enter_context(served(model, flags)) for name, flags in services(setting).items()}
        engine = stack.enter_context(Engine(model, setting.long))
        seen = asyncio.run(live(urls, setting, engine))
        slower = statistics.median(engine.seconds) / MeasuredModel("", alone).prefill_s(setting.long, setting.long**2)
        print(f"the engine took {slower:.2f} times as long as at calibration")
        alone, crowded = alone.slower(slower), crowded.slower(slower)
        besides_s = seen[ONE].short_s - MeasuredModel("", alone).prefill_s(setting.short, setting.short**2)
        played = simulate_all(setting, alone, crowded, hidden_bytes(model), max(0.0, besides_s))
        report = Report(setting=setting, live=seen, simulated=played, alone=alone, crowded=crowded)
    Console().print(table(report))
    sentences, holds = verdict(report)
    print("\n".join(sentences))
    if given.json is not None:
        given.json.write_text(json_text(report), "utf-8")
    return 0 if holds else 1


def services(setting: Setting) -> dict[str, Sequence[str]]:
    """Return the flags of `twofold serve` for each service."""
    common = ["--no-pin-cores", "--kv-cache-memory-bytes", "256MiB"]
    chunks = ["--pipeline-chunk", str(setting.chunk)]
    return {ONE: common, TWO: [*common, "--prefill-pp", "2"], CHUNKED: [*common, "--prefill-pp", "2", *chunks]}


def made_model(directory: Path, setting: Setting) -> Path:
    size = ["--max-model-len", str(setting.long + 16), "--layers", "8", "--hidden-size", "512"]
    command = [sys.executable, "-m", "twofold.cli.main", "model", "create", str(directory), *size]
    subprocess.run(command, check=True)
    return directory


def hidden_bytes(model: Path) -> int:
    """Return the bytes of activations per token between two pipeline stages."""
    config = msgspec.json.decode((model / "config.json").read_bytes())
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    return int(config["hidden_size"]) * (4 if named == "float32" else 2)


if __name__ == "__main__":
    sys.exit(main())
