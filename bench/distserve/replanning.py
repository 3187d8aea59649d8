"""Simulate re-planning of prefill and decode roles after a traffic change, and in stationary traffic.

Four machines first serve long prompts with short outputs. After half of `--minutes`, the traffic changes to
short prompts with long outputs, at nearly twice the request rate. The script prints the SLO attainment per
minute with and without re-planning, for each of two routers. It also prints the delay from the traffic change
to the first role change, and the number of needless re-plannings in `--hours` hours of stationary traffic.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.cluster.file import parse_cluster
from twofold.hardware.catalog import load_catalog
from twofold.planning.splits import SplitPlanner
from twofold.reporting.output import json_text
from twofold.request import Request
from twofold.scheduling.replan.replanner import ReplanDecision, Replanner
from twofold.scheduling.replan.traffic import TrafficMonitor
from twofold.simulation.observers.base import Observer
from twofold.simulation.replanning import SimulatedReplanning
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.timeline import Timeline

CATALOG = load_catalog()
CLUSTER = "3xh100:prefill,1xh100:decode"
MODEL = "llama2-70b"
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
SEARCH_S = 5.0
STATIONARY_RATES = (4.0, 8.0, 12.0)


class Traffic(msgspec.Struct, frozen=True):
    """Stationary traffic: requests per second, and mean prompt and output lengths in tokens."""

    rate: float
    prompt_tokens: int
    output_tokens: int


BEFORE = Traffic(8.0, 1500, 40)
AFTER = Traffic(14.0, 400, 200)


class TimelineCollector(Observer):
    """Observer that collects the timeline of every request."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self.timelines.append(timeline)


def requests(parts: Sequence[tuple[Traffic, float]], seed: int) -> Iterator[Request]:
    """Yield the requests of consecutive traffic phases: Poisson arrivals, gamma-distributed lengths (CV = 0.7)."""
    draw = random.Random(seed)
    now, end, number = 0.0, 0.0, 0
    for traffic, duration_s in parts:
        now, end = end, end + duration_s
        while (now := now + draw.expovariate(traffic.rate)) < end:
            prompt = draw.gammavariate(2.0, traffic.prompt_tokens / 2)
            output = draw.gammavariate(2.0, traffic.output_tokens / 2)
            sizes = max(1, round(prompt)), max(1, round(output))
            yield Request(id=str(number), arrival_s=now, prompt_tokens=sizes[0], output_tokens=sizes[1])
            number += 1


def served(wanted: Sequence[Request], router: str, *, replan: bool) -> tuple[list[Timeline], Sequence[ReplanDecision]]:
    spec = msgspec.structs.replace(parse_cluster(CLUSTER, model=MODEL, catalog=CATALOG), router=router)
    ends = TimelineCollector()
    observers: list[Observer] = [ends]
    if not replan:
        simulate(spec, wanted, catalog=CATALOG, observers=observers, series=False)
        return ends.timelines, ()
    replanning = SimulatedReplanning(Replanner(TrafficMonitor()), SplitPlanner(spec, CATALOG, SLO), search_s=SEARCH_S)
    simulate(spec, wanted, catalog=CATALOG, observers=[*observers, replanning], series=False, prepare=replanning.attach)
    return ends.timelines, replanning.log


def by_minute(timelines: Sequence[Timeline], minutes: int) -> list[float]:
    """Return the SLO attainment of the requests that arrived in each minute."""
    came, met = [0] * minutes, [0] * minutes
    for timeline in timelines:
        minute = int(timeline.request.arrival_s // 60)
        came[minute] += 1
        met[minute] += SLO.met_by(timeline)
    return [good / all_ for good, all_ in zip(met, came, strict=True)]


def step(minutes: int, seed: int, console: Console) -> dict[str, list[float]]:
    """Print and return the SLO attainment of each design by minute, and print the decisions."""
    half_s = minutes * 30.0
    wanted = list(requests(((BEFORE, half_s), (AFTER, half_s)), seed))
    designs = {
        "jsq": ("jsq", False),
        "jsq-planned, --replan": ("jsq-planned", True),
        "splitwise": ("splitwise", False),
        "splitwise, --replan": ("splitwise", True),
    }
    table = Table(
        title=f"Seed {seed}: share within the SLO by minute of arrival; the step is at {half_s:.0f} s",
        title_justify="left",
    )
    table.add_column("router")
    for minute in range(minutes):
        table.add_column(str(minute), justify="right")
    logs, attained = {}, {}
    for name, (router, replan) in designs.items():
        timelines, logs[name] = served(wanted, router, replan=replan)
        attained[name] = by_minute(timelines, minutes)
        table.add_row(name, *(f"{share:.0%}" for share in attained[name]))
    console.print(table)
    for name, log in logs.items():
        for decision in log:
            console.print(f"{name}: at {decision.at_s:.1f} s, {decision}", highlight=False)
    return attained


def stationary(hours: float, seeds: int, console: Console) -> int:
    """Print and return the number of role changes during stationary traffic, where none is needed."""
    table = Table(title=f"{hours:g} h of stationary traffic", title_justify="left")
    for heading in ("requests/s", "seed", "requests", "decisions", "moves", "CPU s"):
        table.add_column(heading, justify="right")
    all_moves = 0
    for rate in STATIONARY_RATES:
        for seed in range(seeds):
            began = time.process_time()
            steady = msgspec.structs.replace(BEFORE, rate=rate)
            wanted = list(requests(((steady, hours * 3600),), seed))
            _, log = served(wanted, "jsq-planned", replan=True)
            moves = sum(len(decision.steps) for decision in log)
            all_moves += moves
            took = f"{time.process_time() - began:.0f}"
            table.add_row(f"{rate:g}", str(seed), f"{len(wanted):,}", str(len(log)), str(moves), took)
    console.print(table)
    return all_moves


def delays(seeds: int, console: Console) -> list[float]:
    """Return the delays in seconds from the traffic change to the first role change; print median and maximum."""
    half_s, found = 300.0, []
    for seed in range(seeds):
        wanted = list(requests(((BEFORE, half_s), (AFTER, 120.0)), 1000 + seed))
        _, log = served(wanted, "jsq-planned", replan=True)
        moved = [decision.at_s - half_s for decision in log if decision.steps and decision.at_s > half_s]
        found.append(moved[0] if moved else float("inf"))
    console.print(
        f"from the step to the move, {seeds} seeds: median {statistics.median(found):.1f} s, longest {max(found):.1f} s"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all results")
    args = parser.parse_args()
    console = Console(width=140)
    attained = step(args.minutes, 0, console)
    delays_s = delays(args.seeds, console)
    moves = stationary(args.hours, args.seeds, console)
    if args.json is not None:
        found = {"attained": attained, "delays_s": delays_s, "stationary_moves": moves}
        args.json.write_text(json_text(found), "utf-8")


if __name__ == "__main__":
    main()
