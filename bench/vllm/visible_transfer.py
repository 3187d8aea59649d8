"""Measure the visible KV transfer of vLLM when prefill and decode run on two hosts.

The visible KV transfer is how much later the second token arrives than with a colocated vLLM, as the median over
requests. Two network namespaces (needs root) represent the hosts, with a link of --bits-per-s between them. Two split
services are measured: vLLM with its NixlConnector and example proxy, and Twofold's vLLM workers with each hand-off
mode.

Exits with 1 if a service fails, if its greedy tokens differ from the colocated vLLM's, or if Twofold's layer-wise
hand-off is not faster than NixlConnector at some prompt length.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
from across_hosts import NIXL, SPLITS, AcrossHosts
from frame import model_directory, run_and_exit, say
from rich.console import Console
from rich.table import Table
from started import Processes
from stock_vllm import SERVED_NAME, StockVllm, vllm_environment
from streamed import ask

from twofold.errors import ConfigurationError, UserError
from twofold.reporting.output import json_text
from twofold.reporting.summary import seconds

sys.path.append(str(Path(__file__).parents[1]))
from two_hosts import two_hosts

OUTPUT = 8
BEST = "layer-wise"


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of one request's second token on the colocated service and on a split service, in seconds."""

    split: str
    prompt_tokens: int
    colocated_s: float
    split_s: float
    same: bool

    @property
    def visible_s(self) -> float:
        return self.split_s - self.colocated_s


class Report(msgspec.Struct, frozen=True, kw_only=True):
    bits_per_s: int
    pairs: list[Pair]

    def of(self, split: str, length: int) -> list[Pair]:
        return [each for each in self.pairs if (each.split, each.prompt_tokens) == (split, length)]

    def visible_s(self, split: str, length: int) -> float | None:
        found = self.of(split, length)
        return statistics.median(each.visible_s for each in found) if found else None


async def compare(urls: dict[str, str], split: str, given: argparse.Namespace) -> list[Pair]:
    """Measure a split service and the colocated service with the same requests."""
    draw, pairs = random.Random(given.seed), list[Pair]()
    for number in range(given.rounds + 1):
        for length in given.lengths:
            prompt = [draw.randrange(10, given.vocabulary) for _ in range(length)]
            order = ["colocated", split] if number % 2 else [split, "colocated"]
            seen = {name: await ask(urls[name], SERVED_NAME, prompt, OUTPUT) for name in order}
            pair = Pair(
                split=split,
                prompt_tokens=length,
                colocated_s=seen["colocated"].second_s,
                split_s=seen[split].second_s,
                same=seen["colocated"].tokens == seen[split].tokens,
            )
            pairs += [pair] if number else []
        say(f"{split}: round {number} of {given.rounds}")
    return pairs


def measure(across: AcrossHosts, given: argparse.Namespace, report: Report) -> Iterator[str]:
    """Measure each split service against the colocated service, and add the results to `report`.

    Yield an error message for each split service that fails.
    """
    with Processes(logs(across.folder, given, "colocated")) as colocated:
        url = across.stock.colocated(colocated, threads=max(1, across.stock.threads // 2))
        for split in given.only or SPLITS:
            with Processes(logs(across.folder, given, split)) as processes:
                try:
                    urls = {"colocated": url, split: across.start(split, processes)}
                    say(f"{split}: ready")
                    report.pairs.extend(asyncio.run(compare(urls, split, given)))
                except UserError as error:
                    yield f"{split}: {error}"
                    say(f"{split}: FAILED")
            given.json.write_text(json_text(report), "utf-8")


def merge_earlier(given: argparse.Namespace) -> list[Pair]:
    """Return the earlier results of the services that `--only` excludes."""
    if not given.only or not given.json.exists():
        return []
    before = msgspec.json.decode(given.json.read_bytes(), type=Report)
    if before.bits_per_s != given.bits_per_s:
        raise ConfigurationError(f"{given.json} was measured with a different --bits-per-s: give another --json")
    return [each for each in before.pairs if each.split not in given.only]


def logs(folder: Path, given: argparse.Namespace, name: str) -> Path:
    path = Path(given.logs or folder) / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def table(report: Report, lengths: list[int]) -> Table:
    splits = [split for split in SPLITS if any(each.split == split for each in report.pairs)]
    drawn = Table(
        title=f"Delay of the second token relative to a colocated vLLM, at {report.bits_per_s / 1e6:,.0f} Mbit/s",
        title_justify="left",
    )
    for name in ("prompt", "colocated", *splits):
        drawn.add_column(name, justify="right", no_wrap=True)
    for length in lengths:
        baseline = [each.colocated_s for each in report.pairs if each.prompt_tokens == length]
        cells = [seconds(report.visible_s(split, length)) for split in splits]
        drawn.add_row(f"{length:,}", seconds(statistics.median(baseline) if baseline else None), *cells)
    return drawn


def violations(report: Report, lengths: list[int]) -> Iterator[str]:
    """Return one sentence per violated expectation."""
    for each in report.pairs:
        if not each.same:
            yield f"{each.split}: tokens of a prompt of {each.prompt_tokens:,} differ from the colocated ones"
    for length in lengths:
        ours, theirs = report.visible_s(BEST, length), report.visible_s(NIXL, length)
        if ours is not None and theirs is not None and ours >= theirs:
            yield f"{length:,} tokens: {BEST} leaves {seconds(ours)}, and vLLM's own connector {seconds(theirs)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--proxy", type=Path, help="vLLM's toy_proxy_server.py (docs/comparison.md)")
    parser.add_argument("--only", nargs="+", choices=SPLITS, help="services to run; keep the others from --json")
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--bits-per-s", type=int, default=200_000_000, help="bandwidth of the link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this directory")
    parser.add_argument("--json", type=Path, default=Path("visible-transfer.json"), help="all figures")
    return parser.parse_args()


def run(given: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Measure all services. Return the report and the messages of failed checks."""
    longest = max(given.lengths) + 2 * OUTPUT
    model = model_directory(given.model, folder, "--max-model-len", str(longest))
    given.vocabulary = msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"]
    stock = StockVllm(
        model=model,
        environment=vllm_environment(folder),
        # No system chunks prompts.
        flags=("--max-model-len", str(longest), "--max-num-batched-tokens", str(longest)),
        threads=len(os.sched_getaffinity(0)),
    )
    report = Report(bits_per_s=given.bits_per_s, pairs=merge_earlier(given))
    with two_hosts(first_local=True) as hosts:
        hosts.limit(given.bits_per_s)
        across = AcrossHosts(hosts=hosts, stock=stock, proxy=given.proxy, longest=longest, folder=folder)
        wrong = list(measure(across, given, report))
    return report, [*wrong, *sorted(set(violations(report, given.lengths)))]


def main() -> None:
    given = arguments()

    def show(report: Report) -> None:
        Console().print(table(report, given.lengths))

    run_and_exit("visible", partial(run, given), show)


if __name__ == "__main__":
    main()
