"""Compare the goodput of role-changing workers and fixed prefill/decode splits, as traffic shifts.

Four machines serve prompt-heavy, then output-heavy, then prompt-heavy traffic. Splitwise's router changes the
roles of machines; each fixed split uses join-the-shortest-queue. Each design runs in the simulator and, unless
--simulate-only, live on emulated machines. Live runs also check that role changes do not alter the tokens of long
outputs. Goodput is the number of requests per second within the SLO.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.client import ClientConfig
from twofold.bench.endpoint import discover
from twofold.bench.load import LoadConfig, run_load
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import served
from twofold.cluster.file import load_cluster
from twofold.hardware.catalog import load_catalog
from twofold.request import Request
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.timeline import Timeline

MACHINES = 4
CLUSTER = """
model: llama2-70b
router: {router}
memory_utilization: 0.21
pools:
  - {{machines: {prefill}, machine: dgx-h100, role: prefill}}
  - {{machines: {decode}, machine: dgx-h100, role: decode}}
"""
SLO = Slo(ttft_s=1.0, tpot_s=0.1)
STREAMS = 16
STREAM_PROMPT, STREAM_TOKENS = 50, 400
STREAM_EVERY_S = 15.0
RECOVERY_S = 10.0


class Phase(msgspec.Struct, frozen=True):
    """Traffic of one period: requests per second, and mean prompt and output lengths in tokens."""

    rate: float
    prompt_tokens: int
    output_tokens: int


PROMPTS = Phase(20.0, 1500, 6)
OUTPUTS = Phase(5.0, 120, 220)


class TimelineCollector(Observer):
    """Observer that collects the timeline of every request."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self.timelines.append(timeline)


def traffic(period_s: float, seed: int) -> Iterator[Request]:
    """Yield Poisson arrivals of prompt-heavy, then output-heavy, then prompt-heavy traffic."""
    draw = random.Random(seed)
    now, number = 0.0, 0
    for place, phase in enumerate((PROMPTS, OUTPUTS, PROMPTS)):
        end = (place + 1) * period_s
        while (now := now + draw.expovariate(phase.rate)) < end:
            yield Request(
                id=f"r{number}",
                arrival_s=now,
                prompt_tokens=round(phase.prompt_tokens * draw.uniform(0.5, 1.5)),
                output_tokens=round(phase.output_tokens * draw.uniform(0.5, 1.5)),
            )
            number += 1
        now = end


def streams(period_s: float) -> Iterator[Request]:
    """Yield 16 requests with long outputs in every 15 s, for three traffic periods of `period_s` seconds."""
    for run in range(round(3 * period_s / STREAM_EVERY_S)):
        for number in range(STREAMS):
            at = (run + number / STREAMS) * STREAM_EVERY_S
            yield Request(
                id=f"s-{number}-{run}", arrival_s=at, prompt_tokens=STREAM_PROMPT, output_tokens=STREAM_TOKENS
            )


def designs() -> dict[str, str]:
    """Return the cluster file of each design, by the design's name."""
    files = {"splitwise, roles move": CLUSTER.format(router="splitwise", prefill=2, decode=2)}
    for prefill in range(1, MACHINES):
        name = f"fixed {prefill}P+{MACHINES - prefill}D"
        files[name] = CLUSTER.format(router="jsq", prefill=prefill, decode=MACHINES - prefill)
    return files


class Outcome(msgspec.Struct, frozen=True):
    """Goodput in requests/s, and SLO attainment of the whole run and of each traffic period."""

    goodput: float
    all: float
    periods: list[float]
    recovered: list[float]


def judge(timelines: Sequence[Timeline], requests: Sequence[Request], period_s: float) -> Outcome:
    counted = {request.id for request in requests}  # the simulation's results include the streams
    met = {timeline.request.id for timeline in timelines if SLO.met_by(timeline)} & counted

    def share(begin: float, end: float) -> float:
        ids = [request.id for request in requests if begin <= request.arrival_s < end]
        return sum(one in met for one in ids) / len(ids)

    starts = [place * period_s for place in range(3)]
    return Outcome(
        goodput=len(met) / (3 * period_s),
        all=share(0, 3 * period_s),
        periods=[share(start, start + period_s) for start in starts],
        recovered=[share(start + RECOVERY_S, start + period_s) for start in starts],
    )


def simulated(file: Path, requests: Sequence[Request], period_s: float) -> Outcome:
    ends = TimelineCollector()
    everything = sorted([*requests, *streams(period_s)], key=lambda request: request.arrival_s)
    simulate(load_cluster(file), everything, catalog=load_catalog(), observers=[ends])
    return judge(ends.timelines, requests, period_s)


async def stream(session: aiohttp.ClientSession, url: str, model: str, number: int) -> list[int]:
    """Run one long stream and return its output tokens."""
    body = {
        "model": model,
        "prompt": [number + 3] * STREAM_PROMPT,
        "max_tokens": STREAM_TOKENS,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"stream {number} broke: {event['error']['message']}")
                tokens += event["choices"][0]["token_ids"]
    return tokens


async def live(url: str, requests: Sequence[Request], period_s: float) -> tuple[Outcome, int]:
    """Send `requests` to the live service at `url`, with long-output requests in the background.

    Return the goodput and SLO attainment of `requests`, and the number of background requests.
    """
    endpoint = await discover(url)
    lowest, vocabulary = token_range(endpoint.vocab_size)
    config = LoadConfig(
        endpoint=endpoint,
        prompts=PromptMaker(lowest=lowest, vocabulary=vocabulary),
        client=ClientConfig(ignore_eos=True),
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        before = await asyncio.gather(*(stream(session, url, endpoint.model, number) for number in range(STREAMS)))

        async def run(request: Request) -> None:
            number = int(request.id.split("-")[1])
            await asyncio.sleep(request.arrival_s)
            if await stream(session, url, endpoint.model, number) != before[number]:
                raise SystemExit(f"stream {number} produced other tokens than before the traffic")

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(request)) for request in streams(period_s)]
            result = await run_load(config, requests)
    if result.errors:
        raise SystemExit(f"requests failed: {result.errors}")
    return judge(result.timelines, requests, period_s), len(running)


def table(title: str, outcomes: dict[str, Outcome]) -> Table:
    made = Table(title=f"{title}: requests within {SLO.ttft_s} s TTFT and {SLO.tpot_s} s TPOT", title_justify="left")
    for column in ("design", "goodput /s", "all", "prompts", "outputs", "prompts", f"each after {RECOVERY_S:.0f} s"):
        made.add_column(column, justify="left" if column == "design" else "right")
    for name, one in outcomes.items():
        after = " ".join(f"{share:.0%}" for share in one.recovered)
        periods = (f"{share:.0%}" for share in one.periods)
        made.add_row(name, f"{one.goodput:.2f}", f"{one.all:.0%}", *periods, after)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--period", type=float, default=40.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    requests, console = list(traffic(args.period, args.seed)), Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{number}.yaml" for number, name in enumerate(designs())}
        for name, text in designs().items():
            files[name].write_text(text)
        console.print(
            table("Simulated", {name: simulated(file, requests, args.period) for name, file in files.items()})
        )
        if args.simulate_only:
            return
        outcomes = {}
        for name, file in files.items():
            with served(None, ["--engine", "emulated", "--cluster", str(file)]) as url:
                outcomes[name], runs = asyncio.run(live(url, requests, args.period))
            print(f"{name}: {runs} long streams with unchanged tokens")
        console.print(table("Live", outcomes))


if __name__ == "__main__":
    main()
