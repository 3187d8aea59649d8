"""Soak test: find leaks of memory, open files, threads and KV blocks in a service under long load.

    python bench/soak.py [--minutes 30] [--share 0.9] [--abuse] [--model DIR] [--json OUT] [-- FLAGS of twofold serve]

Measures the capacity of the service (default: --prefill 1 --decode 1) in requests per second at a fixed concurrency,
then sends Poisson arrivals at `--share` of the capacity for `--minutes`. One client in ten disconnects at a random
time. With `--abuse`, another process attacks the service all the time, as attacks.py does: silent connections, clients
that do not read or that disconnect behind pipelined requests, and deep and wide bodies. Exits with 1 if a request fails
or has a wrong output length, a worker restarts, a resource of a process grows, or KV blocks are in use while the
service is idle.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from attackers import ATTACKS, MODEL
from soak_load import AT_ONCE, Load
from soak_samples import ProcessSample, Sample, Sampler, blocks_held
from soak_trend import RULE, Trend, Verdict, verdict_of
from twofold.bench.client import Client, ClientConfig
from twofold.bench.endpoint import discover
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import metrics, served
from twofold.engine.model_factory import ModelSpec, create_model
from twofold.events import Recorder
from twofold.timeline import Timeline

REST_S = 6.0
WARM_UP = 0.2  # share of the time
WARM_UP_LOAD = 0.9  # share of the capacity
ASKED = 24  # requests that reach each of a few gateway processes
ABUSES = ("silent connections", "unread streams", "pipelined disconnects", "deep and wide")
PAUSE_S = 5.0  # between two of them
WARM_UP_PAUSE_S = 1.0  # between two of a kind
MEMORY, COUNTS = ("anonymous", "uss", "rss"), ("files", "sockets", "threads", "segments")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Trend of one resource of a process under load, and the resource's values at idle before and after the load."""

    process: str
    what: str
    trend: Trend
    rest: tuple[int, int]
    verdict: Verdict | None  # None for `uss` and `rss`, which also grow without leaks (see `ProcessSample`)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a soak test."""

    flags: list[str]
    minutes: float
    capacity_per_s: float
    rate_per_s: float
    ended: dict[str, int]  # requests by outcome
    restarts: int
    held: dict[str, int]  # KV blocks in use while idle, by instance
    rows: list[Row]
    samples: list[Sample]

    @property
    def failures(self) -> list[str]:
        failed = [f"{count} × {how}" for how, count in self.ended.items() if how not in {"whole", "left"}]
        failed += [f"{row.process}: {row.what} grows" for row in self.rows if row.verdict is Verdict.GROWS]
        failed += [f"{count} blocks of {name} held at rest" for name, count in self.held.items() if count]
        return failed + ([f"{self.restarts} worker restarts"] if self.restarts else [])


async def at_rest(sampler: Sampler, url: str) -> Sample:
    await asyncio.sleep(REST_S)
    for _ in range(ASKED):  # each gateway process keeps the connection over which it passes such requests on
        await asyncio.to_thread(metrics, url)
    return await asyncio.to_thread(sampler.look, time.monotonic())


def abuse(port: int, names: Sequence[str], pause_s: float) -> None:
    """Attack a service in each of these ways, one after another, until this process is ended."""

    async def at_once() -> None:
        return

    async def attack() -> None:
        for name in cycle(names):
            await ATTACKS[name].run(port, at_once)
            await asyncio.sleep(pause_s)

    asyncio.run(attack())


@contextmanager
def abused(port: int, names: Sequence[str], pause_s: float) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=abuse, args=(port, names, pause_s))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


async def soak(url: str, flags: list[str], given: argparse.Namespace) -> Report:
    endpoint = await discover(url)
    lowest, vocabulary = token_range(endpoint.vocab_size)
    prompts = PromptMaker(seed=given.seed, lowest=lowest, vocabulary=vocabulary)
    sampler = Sampler(psutil.Process().children()[0].pid, url, time.monotonic())
    ends: dict[str, Timeline] = {}
    recorder = Recorder([lambda timeline: ends.__setitem__(timeline.request.id, timeline)])
    samples: list[Sample] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(given.every)
            samples.append(await asyncio.to_thread(sampler.look, time.monotonic()))

    async with Client(endpoint, recorder, ClientConfig()) as client:
        load = Load(client, prompts, ends, given.seed)
        capacity = await load.capacity(given.capacity_seconds)
        print(f"capacity: {capacity:.2f} requests a second, {AT_ONCE} at once; now {given.share:.0%} of it", flush=True)
    port = int(url.rpartition(":")[2])

    async def under_load(
        share: float, minutes: float, seed: int, attackers: Sequence[Sequence[str]], pause_s: float
    ) -> Load:
        async with AsyncExitStack() as stack:
            for names in attackers if given.abuse else ():
                stack.enter_context(abused(port, names, pause_s))
            client = await stack.enter_async_context(Client(endpoint, recorder, ClientConfig()))
            load = Load(client, prompts, ends, seed)
            await load.run(share * capacity, 60 * minutes)
            return load

    # Threads and caches grow until each gateway process has had work of each kind, and a heap as long as attacks set a
    # new record of the memory in use: so the attacks all run together, many times.
    each = [[name] for name in ABUSES]
    await under_load(WARM_UP_LOAD, WARM_UP * given.minutes, given.seed + 1, each, WARM_UP_PAUSE_S)
    before = await at_rest(sampler, url)
    watching = asyncio.create_task(watch())
    load = await under_load(given.share, (1 - WARM_UP) * given.minutes, given.seed + 2, [ABUSES], PAUSE_S)
    watching.cancel()
    await asyncio.wait({watching})
    if not watching.cancelled():
        watching.result()  # re-raise its error
    after = await at_rest(sampler, url)
    restarts = [line for line in metrics(url).splitlines() if line.startswith("twofold:worker_restarts_total{")]
    return Report(
        flags=flags,
        minutes=given.minutes,
        capacity_per_s=capacity,
        rate_per_s=given.share * capacity,
        ended=dict(load.ended),
        restarts=sum(int(float(line.split()[-1])) for line in restarts),
        held=blocks_held(url),
        rows=rows_of(samples, before, after),
        samples=[before, *samples, after],
    )


def rows_of(loaded: list[Sample], before: Sample, after: Sample) -> list[Row]:
    times = [sample.at_s for sample in loaded]
    rows = []
    for process in before.processes:
        for what in MEMORY + COUNTS:
            values = [value_of(sample.processes[process], what) for sample in loaded]
            trend = Trend.of(times, values)
            rest = (value_of(before.processes[process], what), value_of(after.processes[process], what))
            verdict = None
            if what in COUNTS:
                verdict = Verdict.GROWS if rest[1] > rest[0] else Verdict.FLAT
            elif what == "anonymous":
                verdict = verdict_of(times, values)
            rows.append(Row(process=process, what=what, trend=trend, rest=rest, verdict=verdict))
    return rows


def value_of(sample: ProcessSample, what: str) -> int:
    value = getattr(sample, what)
    assert isinstance(value, int)  # noqa: S101  (a numeric field; for the type checker)
    return value


def table(report: Report) -> Table:
    title = f"{report.minutes:g} minutes at {report.rate_per_s:.2f} requests a second"
    made = Table(title=title, title_justify="left", caption=RULE, caption_justify="left")
    for column in ("process", "what", "start", "end", "an hour", "±", "at rest before", "after", ""):
        made.add_column(column, justify="left" if column in {"process", "what", ""} else "right")
    for row in report.rows:
        mib = 2.0**20 if row.what in MEMORY else 1.0
        trend = (row.trend.start, row.trend.end, row.trend.per_h, row.trend.noise_per_h)
        shown = [f"{value / mib:.1f}" for value in trend] + [f"{value / mib:.4g}" for value in row.rest]
        unit = f"{row.what} MiB" if row.what in MEMORY else row.what
        made.add_row(row.process, unit, *shown, row.verdict.value if row.verdict else "")
    return made


def serve_and_soak(given: argparse.Namespace) -> Report:
    flags = given.flags or ["--prefill", "1", "--decode", "1"]
    flags = [*flags, "--served-model-name", MODEL]
    with ExitStack() as stack:
        model = given.model
        if model is None and "emulated" not in flags:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-soak-"))) / "model"
            create_model(model, ModelSpec(hidden_size=256, layers=6))
        return asyncio.run(soak(stack.enter_context(served(model, flags)), flags, given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.9, help="load as a share of the capacity")
    parser.add_argument("--abuse", action="store_true", help="attack the service meanwhile")
    parser.add_argument("--capacity-seconds", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("flags", nargs="*", help="flags of twofold serve, after --")
    given = parser.parse_args()
    report = serve_and_soak(given)
    Console(width=120).print(table(report))
    print(f"requests: {report.ended}; blocks held at rest: {report.held}")
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    for failure in report.failures:
        print(f"FAILED: {failure}")
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
