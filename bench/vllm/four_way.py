"""Compare colocated vLLM, vLLM split by NixlConnector or by Twofold, and Twofold's torch engine.

Each system runs alone on the same cores, with the same small model in float32 and without prefix caching. The
client `vllm bench serve` sends every system the same greedy requests, with Poisson arrivals and uniformly
distributed random lengths. Run this script with a Python that has vLLM and Twofold (docs/comparison.md). With
--only, earlier results of other systems are kept. Exits with 1 if a system does not start or leaves a request
unanswered.
"""

import argparse
import os
import platform
import time
from functools import partial
from pathlib import Path

import msgspec
from compared import SYSTEMS, Setting
from comparison_table import markdown, terminal
from frame import model_directory, run_and_exit, say
from outside_client import Load, Measured, measure
from rich.console import Console
from started import Processes
from stock_vllm import StockVllm, vllm_environment

from twofold.errors import ConfigurationError, UserError
from twofold.reporting.output import json_text

MAX_MODEL_LEN = 2048
ALL_CORES = sorted(os.sched_getaffinity(0))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: str
    cores: int
    load: Load
    systems: dict[str, list[Measured]]


def machine() -> str:
    """Return the CPU model name that the operating system reports."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--proxy", type=Path, help="vLLM's toy_proxy_server.py (docs/comparison.md)")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, help="systems to run; keep the others from --json")
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="requests/s")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of arrivals per rate")
    parser.add_argument("--prompts", type=int, nargs=2, default=(256, 1024), metavar=("LEAST", "MOST"))
    parser.add_argument("--outputs", type=int, nargs=2, default=(32, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--ttft", type=float, default=2.0, help="SLO in seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="SLO in seconds")
    parser.add_argument("--cores", type=int, help="cores for the systems (default: all); the client gets the rest")
    parser.add_argument("--transport", default="nixl", help="transport of Twofold's workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this directory")
    parser.add_argument("--json", type=Path, default=Path("four-way.json"), help="all figures")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args()


def merge_earlier(path: Path, report: Report) -> Report:
    """Return the earlier report in the file `path` unchanged, or `report` if the file does not exist.

    Raises ConfigurationError if the earlier report has another machine, number of cores or load than `report`.
    """
    if not path.exists():
        return report
    before = msgspec.json.decode(path.read_bytes(), type=Report)
    for what in ("machine", "cores", "load"):
        if getattr(before, what) != getattr(report, what):
            raise ConfigurationError(f"{path} was measured with a different {what}: give another --json")
    return before


def rates(setting: Setting, system: str, given: argparse.Namespace, report: Report, logs: Path) -> list[Measured]:
    """Start one system, measure it at every rate, and stop it."""
    found = []
    began_s = time.monotonic()
    with Processes(logs) as processes:
        url = SYSTEMS[system].start(setting, processes)
        say(f"{system}: ready after {time.monotonic() - began_s:.0f} s")
        for rate in given.rates:
            each = measure(url, setting.stock, report.load, rate, logs, client_cores(report.cores))
            say(
                f"{system}: {rate:g}/s: {each.completed} of {each.sent} answered, "
                f"{each.attainment:.0%} within the SLO, P99 ITL {each.p99_itl_ms:.0f} ms, in {each.duration_s:.0f} s"
            )
            found.append(each)
    return found


def client_cores(cores: int) -> list[int]:
    """Return the CPU cores that the benchmarked serving systems leave to the client, or all CPU cores if
    no core is left.
    """
    return ALL_CORES[cores:] or ALL_CORES[:cores]


def title(report: Report) -> str:
    load = report.load
    (prompt_least, prompt_most), (output_least, output_most) = load.prompt_tokens, load.output_tokens
    return (
        f"{report.machine}, {report.cores} cores. Prompts of {prompt_least:,} to {prompt_most:,} tokens, outputs of "
        f"{output_least} to {output_most}, Poisson arrivals for {load.seconds:g} s. SLO: TTFT ≤ {load.ttft_s:g} s and "
        f"TPOT ≤ {load.tpot_s * 1e3:g} ms."
    )


def run(given: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Measure every system in turn. Return the report and one sentence per failure."""
    load = Load(
        prompt_tokens=tuple(given.prompts),
        output_tokens=tuple(given.outputs),
        seconds=given.seconds,
        ttft_s=given.ttft,
        tpot_s=given.tpot,
        seed=given.seed,
    )
    cores = given.cores or len(ALL_CORES)
    report = Report(machine=machine(), cores=cores, load=load, systems={})
    if given.only:
        report = merge_earlier(given.json, report)
    stock = StockVllm(
        model=model_directory(given.model, folder),
        environment=vllm_environment(folder),
        flags=("--max-model-len", str(MAX_MODEL_LEN)),
        threads=cores,
    )
    os.sched_setaffinity(0, ALL_CORES[:cores])  # inherited by child processes
    setting = Setting(stock=stock, max_model_len=MAX_MODEL_LEN, proxy=given.proxy, transport=given.transport)
    wrong = []
    for system in given.only or SYSTEMS:
        logs = (given.logs or folder) / system
        logs.mkdir(parents=True, exist_ok=True)
        try:
            found = rates(setting, system, given, report, logs)
        except UserError as error:
            wrong.append(f"{system}: {error}")
            say(f"{system}: FAILED")
            continue
        wrong += [
            f"{system}: {each.completed} of {each.sent} requests were answered at {each.rate:g}/s"
            for each in found
            if each.completed < each.sent
        ]
        report.systems[system] = found
        given.json.write_text(json_text(report), "utf-8")
    return report, wrong


def main() -> None:
    given = arguments()

    def show(report: Report) -> None:
        Console(width=200).print(terminal(report.systems, title(report)))
        if given.markdown is not None:
            given.markdown.write_text(markdown(report.systems, title(report)))

    run_and_exit("four-way", partial(run, given), show)


if __name__ == "__main__":
    main()
