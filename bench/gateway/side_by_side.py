"""Measure `twofold route`, `twofold serve` and other routers side by side, per CPU second of the router.

Each router runs on one core, in front of mock vLLM servers (mock_server.c). The mock servers and the load generator
(load.c) run on another core. All routers get the same requests on the same number of connections, one router after
the other, cell by cell and round by round. Figures are medians of the rounds, ratios are medians of the ratios within
each round:

- requests or tokens per CPU second: CPU time of the router and its child processes, during a closed loop
- added TTFB: time to the first byte of the body in an open loop at a low rate, less that of the same load on the mock
  server itself, for each percentile
- added latency at 80%: time to the end of the output in an open loop whose rate keeps the router's core 80% busy, less
  the median of the mock server itself at the low rate. The rate is searched: at less than full load a router finds
  fewer events each time that it wakes, so 80% of the closed loop's throughput may take all of its core

`twofold route` runs with an API key, a deadline and metrics. `twofold serve` runs an emulated cluster, and its CPU time
is that of the process with gateway and controller, without workers; it is compared with vllm-router's streams of tokens
that are 20 ms apart. The bare proxy (bare_proxy.py) is in Python, too, and has no function but to forward texts.
vllm-router and sglang-router have virtual environments of their own. They run with round robin,
their cheapest policy, without a log line per request, and otherwise with their defaults. A router without an
environment is skipped. "Overloaded" marks routers that left requests unsent at 80%: all connections of the load
generator were busy. Other processes on the same cores lengthen latencies far more than CPU times. Exits with 1 if a
request fails.
"""

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gateway_table import DIRECT, SERVE, Measured, Report, terminal
from measured_routers import HERE, KEY, MODEL_NAME, ROUTERS, Behind, cpu_s, emulated_service, pin, release
from native import LOAD, MOCK, LoadResult, compile_programs, offer, on_cores, set_gap
from rich.console import Console

from twofold.bench.services import free_port
from twofold.hardware.architectures import ConfigJson
from twofold.reporting.output import json_text

sys.path.append(str(Path(__file__).parents[1] / "vllm"))
from frame import model_directory, run_and_exit, say
from started import Processes

CORES = sorted(os.sched_getaffinity(0))

MOST_CONNECTIONS = 1000  # of an open loop
MOST_TOKEN_IDS = 8192
SHARE, NEAR, TRIES = 0.8, 0.04, 5  # CPU time of a router per second of the open loop, and the search for its rate
PATIENCE_S = 60.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
SMALL_MODEL = ("--hidden-size", "64", "--layers", "1", "--heads", "2", "--kv-heads", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A load. `gap_ms` is the time between two tokens of a stream, `low_rate` the low load in requests/s."""

    title: str
    prompt_bytes: int = 1_000
    tokens: int = 64
    streams: bool = True
    gap_ms: float = 0.0
    stops: int = 0
    connections: int
    low_rate: float

    @property
    def flags(self) -> list[str]:
        """Flags of the load generator."""
        flags = ["--prompt-bytes", str(self.prompt_bytes), "--tokens", str(self.tokens), "--stops", str(self.stops)]
        return [*flags, "--stream"] if self.streams else flags

    @property
    def stream_ms(self) -> float:
        """Time from the first to the last token."""
        return self.gap_ms * (self.tokens - 1)


_PACED = Cell(title="64 tokens, 20 ms apart: tokens", gap_ms=20, connections=128, low_rate=10)
_WHOLE = Cell(title="1 KB prompt, 1 token: requests", tokens=1, streams=False, connections=64, low_rate=50)
PLAIN = {
    "short": _WHOLE,
    "stream": _PACED,
    "stops": dataclasses.replace(_PACED, title="… with 4 stop strings: tokens", stops=4),
    "burst": Cell(title="64 tokens in a burst: tokens", connections=64, low_rate=20),
    "long": dataclasses.replace(
        _WHOLE, title="200 KB prompt, 1 token: requests", prompt_bytes=200_000, connections=8, low_rate=2
    ),
}
SPLIT = {"split": dataclasses.replace(_PACED, title="… split, 1P+1D: tokens")}
SERVED = {"serve": dataclasses.replace(_PACED, title="… emulated cluster: tokens")}
CELLS = {**PLAIN, **SPLIT, **SERVED}


@dataclass(frozen=True, slots=True)
class Target:
    """A started router, or a mock server itself. `spent_s` reads the CPU seconds so far."""

    name: str
    port: int
    mocks: Sequence[str]
    spent_s: Callable[[], float] | None = None


class SideBySide:
    """Starts routers and mock servers, and measures them. `folder` has the compiled programs."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._model = model_directory(given.model, folder, *SMALL_MODEL)
        self._seeds = itertools.count(1)
        self.versions: dict[str, str] = {}
        self._pythons = dict(self._environments())

    def rounds(self) -> Iterator[Measured]:
        """Yield the measurements of every round."""
        chosen = self._given.cells
        for number in range(self._given.rounds):
            for cells in (PLAIN, SPLIT):
                wanted = {name: cell for name, cell in cells.items() if name in chosen}
                if wanted:
                    yield from self._round(number, wanted, split=cells is SPLIT)
            if "serve" in chosen:
                yield self._served(number)

    def _round(self, number: int, cells: dict[str, Cell], *, split: bool) -> Iterator[Measured]:
        with Processes(self._logs(number)) as processes:
            targets = [self._direct(processes)]
            targets += [
                self._started(processes, name, python, split=split)
                for name, python in self._pythons.items()
                if ROUTERS[name].splits or not split
            ]
            for name, cell in cells.items():
                for target in targets:
                    yield self._measure(number, name, cell, target)

    def _environments(self) -> Iterator[tuple[str, Path]]:
        for name, router in ROUTERS.items():
            if router.package is None:
                yield name, Path(sys.executable)
                continue
            environment = getattr(self._given, router.package)
            if environment is None:
                say(f"{name} is skipped: --{router.package.replace('_', '-')} names no virtual environment")
                continue
            version = release(environment, router.package)
            if version is None:
                say(f"{name} is skipped: {environment} has no package {router.package}")
                continue
            self.versions[name] = version
            yield name, environment / "bin" / "python"

    def _logs(self, number: int) -> Path:
        logs = self._folder / f"round-{number + 1}"
        logs.mkdir(exist_ok=True)
        return logs

    def _mock(self, processes: Processes, name: str) -> str:
        port = free_port()
        command = [str(self._folder / MOCK), "--host", HERE, "--port", str(port), "--model", MODEL_NAME]
        command += [
            "--vocab-size",
            str(min(ConfigJson(self._model, part="text_config").number("vocab_size"), MOST_TOKEN_IDS)),
        ]
        processes.start(name, on_cores([self._given.load_core], command), ENVIRONMENT)
        url = f"http://{HERE}:{port}"
        processes.wait(f"{url}/health")
        return url

    def _direct(self, processes: Processes) -> Target:
        url = self._mock(processes, "mock")
        return Target(DIRECT, int(url.rpartition(":")[2]), [url])

    def _started(self, processes: Processes, name: str, python: Path, *, split: bool) -> Target:
        short = name.replace(" ", "-")
        urls = tuple(self._mock(processes, f"{short}-mock-{number}") for number in range(2 if split else 1))
        port = free_port()
        command = ROUTERS[name].command(python, self._model, Behind(urls), port)
        log = f"{short}-split" if split else short
        processes.start(log, on_cores([self._given.router_core], command), ENVIRONMENT)
        processes.wait(f"http://{HERE}:{port}/health")
        return Target(name, port, urls, partial(cpu_s, processes.pid(log), tree=True))

    def _served(self, number: int) -> Measured:
        given, port = self._given, free_port()
        with Processes(self._logs(number)) as processes:
            command = emulated_service(self._model, self._folder, port, "--api-key", KEY)
            processes.start("twofold-serve", command, ENVIRONMENT)
            processes.wait(f"http://{HERE}:{port}/health")
            gateway = processes.pid("twofold-serve")
            pin(gateway, given.router_core, [given.load_core])
            target = Target(SERVE, port, [], partial(cpu_s, gateway, tree=False))
            return self._measure(number, "serve", SERVED["serve"], target)

    def _measure(self, number: int, name: str, cell: Cell, target: Target) -> Measured:
        for url in target.mocks:
            set_gap(url, cell.gap_ms)
        self._closed(target, cell, self._given.warm_up)
        before_s = target.spent_s() if target.spent_s else 0.0
        closed = self._closed(target, cell, self._given.seconds)
        spent_s = target.spent_s() - before_s if target.spent_s else None
        low = high = None
        if target.mocks:
            low = self._open(target, cell, cell.low_rate)
        if target.mocks and target.spent_s and spent_s and closed.requests:
            high = self._busy(target, target.spent_s, cell, SHARE * closed.requests / spent_s)
        measured = Measured(
            cell=name,
            router=target.name,
            number=number,
            units=closed.tokens if cell.streams else closed.requests,
            closed=closed,
            cpu_s=spent_s,
            low=low,
            high=high,
        )
        each = "" if measured.per_cpu_s is None else f", {measured.per_cpu_s:,.0f} per CPU second"
        say(f"round {number + 1}, {name}, {target.name}: {closed.requests / closed.seconds:,.1f} requests/s{each}")
        return measured

    def _busy(self, target: Target, spent_s: Callable[[], float], cell: Cell, rate: float) -> LoadResult:
        """Return the result of an open loop that keeps the router's core busy for a share near SHARE."""
        for left in reversed(range(TRIES)):
            before_s = spent_s()
            load = self._open(target, cell, rate)
            share = (spent_s() - before_s) / self._given.seconds
            if abs(share - SHARE) <= NEAR or not left:
                break
            rate *= SHARE / share
        say(f"{target.name}, {rate:,.0f} requests/s: core {share:.0%} busy")
        return load

    def _closed(self, target: Target, cell: Cell, seconds: float) -> LoadResult:
        flags = ["--connections", str(cell.connections), "--ramp-ms", str(cell.stream_ms)]
        return self._load(target, cell, seconds, flags)

    def _open(self, target: Target, cell: Cell, rate: float) -> LoadResult:
        flags = ["--connections", str(MOST_CONNECTIONS), "--rate", f"{rate:.3f}"]
        return self._load(target, cell, self._given.seconds, flags)

    def _load(self, target: Target, cell: Cell, seconds: float, flags: Sequence[str]) -> LoadResult:
        command = [str(self._folder / LOAD), "--host", HERE, "--port", str(target.port), "--model", MODEL_NAME]
        command += ["--key", KEY, *cell.flags, *flags, "--seconds", str(seconds), "--timeout", str(PATIENCE_S)]
        command += ["--seed", str(next(self._seeds))]
        return offer(on_cores([self._given.load_core], command), seconds + 2 * PATIENCE_S)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", type=Path, metavar="DIR", help="virtual environment with vllm-router")
    parser.add_argument("--sglang-router", type=Path, metavar="DIR", help="virtual environment with sglang-router")
    parser.add_argument("--model", type=Path, help="directory with config.json and tokenizer (default: a small model)")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="loads to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load (default: 5)")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds of load before each measurement")
    parser.add_argument("--router-core", type=int, default=CORES[0], help="core of the router (default: the first)")
    parser.add_argument("--load-core", type=int, default=CORES[-1], help="core of everything else (default: the last)")
    parser.add_argument("--folder", type=Path, help="keep programs, model and logs in this directory")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    return parser.parse_args()


def failures(measured: Measured) -> Iterator[str]:
    """Yield one sentence per load with failed requests."""
    for name, load in (("closed loop", measured.closed), ("low load", measured.low), ("80% load", measured.high)):
        if load is not None and load.errors:
            yield (
                f"{measured.router}, {measured.cell}, {name}, round {measured.number + 1}: {load.errors} of "
                f"{load.sent} requests failed: {load.error}"
            )


def run(given: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Measure all routers. Return the report and one sentence per load with failed requests."""
    compile_programs(folder)
    bench = SideBySide(given, folder)
    setting = (
        f"{given.rounds} rounds of {given.seconds:g} s per load; routers on core {given.router_core}, mock servers and "
        f"load on core {given.load_core} of {len(CORES)}."
    )
    report = Report(setting=setting, versions=bench.versions, measured=[])
    wrong: list[str] = []
    for measured in bench.rounds():
        report.measured.append(measured)
        wrong += failures(measured)
        if given.json is not None:
            given.json.write_text(json_text(report), "utf-8")
    return report, wrong


def main() -> None:
    given = arguments()
    titles = {name: cell.title for name, cell in CELLS.items()}

    def show(report: Report) -> None:
        Console(width=160).print(terminal(report, titles))

    run_and_exit("gateway", partial(run, given), show, given.folder)


if __name__ == "__main__":
    main()
