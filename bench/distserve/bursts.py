"""Compare queues, KV memory and latencies of three hand-off policies in a simulated burst of requests.

Simulates llama2-70b on one prefill and one decode machine (DGX-H100), each with KV memory for `--kv-tokens` tokens. Two
requests per second arrive for a minute; after ten seconds, `--burst` more arrive within one second. The policies are:

    layer-wise     prefill writes into decode memory that is reserved at arrival
    pull           finished prompts wait in prefill memory until decode has room (DistServe, section 4.3)
    pull, growing  like pull, but decode memory is allocated on demand; when it is full, the youngest requests are
                   swapped out over PCIe
"""

import argparse
import random
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.cluster.timing import PS
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.instance.status import InstanceStatus
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import build_cluster
from twofold.simulation.statistics import RunStatistics
from twofold.timeline import Timeline

RATE, SECONDS, BURST_AT_S = 2.0, 60.0, 10.0
PROMPT_TOKENS = (200, 1800)
SWAP_SPACE_BYTES = 10**12
POOLS = tuple(PoolSpec(machines=1, machine="dgx-h100", role=role) for role in (Role.PREFILL, Role.DECODE))


class TimelineCollector(Observer):
    """Observer that collects the timeline of every request."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self.timelines.append(timeline)


class BurstRun(msgspec.Struct):
    """Result of a simulated burst: request timelines, instance statuses over time, and peak memory use."""

    every_s: float
    looks: list[tuple[float, InstanceStatus, InstanceStatus]] = []
    most_held: int = 0
    most_used: float = 0.0
    timelines: list[Timeline] = []
    end_s: float = 0.0

    def look(self, at_s: float, prefill: InstanceStatus, decode: InstanceStatus) -> int:
        """Record the statuses before an event. Returns −1, so that the kernel calls this before each event."""
        self.most_held = max(self.most_held, prefill.handing_off)
        self.most_used = max(self.most_used, used(decode))
        if not self.looks or at_s >= self.looks[-1][0] + self.every_s:
            self.looks.append((at_s, prefill, decode))
        return -1


def used(status: InstanceStatus) -> float:
    """Return the share of an instance's KV blocks that are in use."""
    return 1 - status.blocks_free / status.blocks_total


def requests(burst: int, output_tokens: tuple[int, int], seed: int) -> list[Request]:
    """Return requests with Poisson arrivals and one burst, in order of arrival."""
    draw = random.Random(seed)
    arrivals = [BURST_AT_S + draw.random() for _ in range(burst)]
    now = draw.expovariate(RATE)
    while now < SECONDS:
        arrivals.append(now)
        now += draw.expovariate(RATE)
    return [
        Request(
            id=str(number),
            arrival_s=at,
            prompt_tokens=draw.randint(*PROMPT_TOKENS),
            output_tokens=draw.randint(*output_tokens),
        )
        for number, at in enumerate(sorted(arrivals))
    ]


def watch(spec: ClusterSpec, some: Sequence[Request], catalog: Catalog, every_s: float) -> BurstRun:
    """Simulate the requests, and sample the status of the prefill and the decode instance every `every_s` seconds."""
    ends, seen = TimelineCollector(), BurstRun(every_s=every_s)
    statistics = RunStatistics(None, None, over_all_tokens=False)
    cluster = build_cluster(spec, catalog, instance_profiles(spec, catalog), statistics, [ends], 1 << 60)
    prefill, decode = (cluster.instances[name].scheduler for name in ("prefill-0", "decode-0"))
    cluster.kernel.before_step = lambda at: seen.look(at / PS, prefill.status(), decode.status())
    cluster.feed(some)
    cluster.kernel.run(until_events=1 << 60)
    seen.look(cluster.kernel.now / PS, prefill.status(), decode.status())
    seen.timelines, seen.end_s = ends.timelines, statistics.last_end / PS
    return seen


def over_time(seen: BurstRun, title: str) -> Table:
    headings = ("s", "prompts wait", "held by prefill", "its memory", "decode memory", "decoding", "swapped out")
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for at_s, prefill, decode in seen.looks:
        counts = (prefill.waiting, prefill.handing_off, decode.running - decode.swapped, decode.swapped)
        waiting, held, decoding, swapped = (f"{count:,}" for count in counts)
        memory = (f"{used(prefill):.0%}", f"{used(decode):.0%}")
        table.add_row(f"{at_s:.0f}", waiting, held, *memory, decoding, swapped)
    return table


def summary(runs: dict[str, BurstRun]) -> Table:
    """Return a table of memory use, latencies and swaps, one row per hand-off policy."""
    headings = ("", "max held by prefill", "max decode memory", "TTFT P50 / P99 s", "TPOT P50 / P99 ms",
                "last token s", "lost", "swaps out", "blocks swapped")  # fmt: skip
    table = Table(title="outcome", title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, seen in runs.items():
        ttft = sorted(t.ttft_s for t in seen.timelines if t.ttft_s is not None)
        tpot = sorted(t.tpot_s * 1e3 for t in seen.timelines if t.tpot_s is not None)
        lost = sum(t.output_tokens != t.request.output_tokens for t in seen.timelines)
        last = seen.looks[-1][2]
        table.add_row(
            name, f"{seen.most_held:,} requests", f"{seen.most_used:.1%}",
            f"{at(ttft, 0.5):.2f} / {at(ttft, 0.99):.2f}", f"{at(tpot, 0.5):.1f} / {at(tpot, 0.99):.1f}",
            f"{seen.end_s:.1f}", f"{lost:,}", f"{last.swaps:,}", f"{last.swap_blocks_moved:,}",
        )  # fmt: skip
    return table


def at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--burst", type=int, default=150)
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(100, 700))
    parser.add_argument("--kv-tokens", type=int, default=40_000)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    catalog, console = load_catalog(), Console()
    some = requests(given.burst, tuple(given.output_tokens), given.seed)
    pull = ClusterSpec(
        pools=POOLS, model="llama2-70b", router="jsq", handoff="pull", kv_capacity_tokens=given.kv_tokens
    )
    designs = {
        "layer-wise": msgspec.structs.replace(pull, handoff="layer-wise"),
        "pull": pull,
        "pull, growing": msgspec.structs.replace(pull, swap_space_bytes=SWAP_SPACE_BYTES),
    }
    runs = {name: watch(spec, some, catalog, given.every) for name, spec in designs.items()}
    for name in ("pull", "pull, growing"):
        console.print(over_time(runs[name], name))
    console.print(summary(runs))


if __name__ == "__main__":
    main()
