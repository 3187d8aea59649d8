"""Agents' sessions: colocated, split, and with append-prefill, live on this machine and simulated.

    python bench/agents.py live --requests 300
    python bench/agents.py live --turns toolagent --scale 0.1 --requests 300
    python bench/agents.py simulated --requests 2000

Each design gets the same turns: of the workload `agent`, or of sessions of 20 turns with the mean lengths of Mooncake's
trace of tools and agents (FAST'25, table 2: 8,596 prompt tokens and 182 of output), where answers are almost half of
the added tokens. The table has the share of prompt tokens found in caches, beside that of an infinite cache that
holds the KV of every prompt and output, and the latencies of the second and later turns.
`live` scales the lengths down to a small model, and shortens the think times. `--before` adds the split service of
another version, whose folder with the package `twofold` it gives; the ratios are over this one then.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from twofold.bench.endpoint import discover
from twofold.bench.load import LoadConfig, run_load
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import served
from twofold.cluster.file import parse_cluster
from twofold.cluster.spec import CacheSpec
from twofold.events import RequestSubscriber
from twofold.hardware.catalog import load_catalog
from twofold.reporting.output import json_text
from twofold.reporting.summary import seconds
from twofold.request import Request
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.simulate import simulate
from twofold.timeline import Timeline
from twofold.workload.rescale import fit_lengths
from twofold.workload.sessions import TOOL_S
from twofold.workload.source import workload

SPLIT = ("--prefill", "1", "--decode", "1")
STORE = ("--kv-store-dram", "2GiB")
APPEND = ("--router", "append")
BEFORE, ANSWERS_AGAIN = "split, before", "split, answers recomputed"
LIVE = {
    BEFORE: SPLIT,
    "colocated": ("--colocated", "1"),
    "split": SPLIT,
    "split, store": (*SPLIT, *STORE),
    "split, append": (*SPLIT, *APPEND),
    "split, append, store": (*SPLIT, *APPEND, *STORE),
}
LIVE_BLOCK = 16
SIMULATED = {
    "colocated": ("{n}xh100:mixed/chunked-prefill", "local-prefix"),
    ANSWERS_AGAIN: ("{p}xh100:prefill,{d}xh100:decode", "local-prefix"),
    "split": ("{p}xh100:prefill,{d}xh100:decode", "conductor"),
    "split, append": ("{p}xh100:prefill,{d}xh100:decode", "append"),
}
SIMULATED_BLOCK = 512

# Lengths of `toolagent` in tokens. With these, the prompts of 20 turns have the published mean.
TURNS, OUTPUT = 20, 182
SHARED, QUESTION, RESULT = 4000, 600, 238


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a design: share of cached prompt tokens, and times of later turns in seconds."""

    design: str
    cached: float
    ideal: float
    ttft_s: list[float]
    tpot_s: list[float]


def toolagent_turns(rate: float, seed: int) -> Iterator[Request]:
    """Yield turns of sessions like those of Mooncake's trace of tools and agents: new tokens and outputs are geometric
    with the published means, and each session begins after an exponential time.
    """
    random, start_s, session = np.random.default_rng(seed), 0.0, 0
    while True:
        prompt = SHARED + int(random.geometric(1 / QUESTION))
        for turn in range(TURNS):
            output = int(random.geometric(1 / OUTPUT))
            yield Request(
                id=f"session-{session}-{turn}",
                arrival_s=start_s,
                prompt_tokens=prompt,
                output_tokens=output,
                session=f"session-{session}",
                think_s=TOOL_S.draw(random) if turn else 0.0,
                shared_tokens=SHARED,
            )
            prompt += output + int(random.geometric(1 / RESULT))
        start_s, session = start_s + float(random.exponential(TURNS / rate)), session + 1


def turns_of(given: argparse.Namespace, rate: float, max_model_len: int | None = None) -> list[Request]:
    """Return the turns of the chosen workload, in their full lengths."""
    if given.turns == "toolagent":
        return list(islice(toolagent_turns(rate, given.seed), given.requests))
    asked = workload("agent", rate=rate, num_requests=given.requests, seed=given.seed, max_model_len=max_model_len)
    return list(asked)


def ideal_share(requests: Sequence[Request], block: int) -> float:
    """Return the share of prompt tokens that an infinite cache of blocks of `block` tokens finds."""
    ends: dict[str, int] = {}  # tokens with KV of each session
    found = 0
    for request in requests:
        shared = request.shared_tokens if ends else 0
        found += min(ends.get(request.session, shared) // block * block, request.prompt_tokens - 1)
        ends[request.session] = request.prompt_tokens + request.output_tokens - 1
    return found / sum(request.prompt_tokens for request in requests)


def of(design: str, cached: float, ideal: float, timelines: Sequence[Timeline]) -> Turns:
    later = [each for each in timelines if not each.request.id.endswith("-0")]
    return Turns(
        design=design,
        cached=cached,
        ideal=ideal,
        ttft_s=[each.ttft_s for each in later if each.ttft_s is not None],
        tpot_s=[each.tpot_s for each in later if each.tpot_s is not None],
    )


async def load(url: str, requests: Sequence[Request]) -> tuple[float, list[Timeline]]:
    endpoint = await discover(url)
    lowest, vocabulary = token_range(endpoint.vocab_size)
    config = LoadConfig(endpoint=endpoint, prompts=PromptMaker(lowest=lowest, vocabulary=vocabulary))
    result = await run_load(config, requests)
    if result.errors or result.cached_share is None:
        raise RuntimeError(f"failed: {result.errors}")
    return result.cached_share, result.timelines


def live(given: argparse.Namespace) -> list[Turns]:
    requests = list(fit_lengths(turns_of(given, given.rate or 2.0), given.scale, None))
    requests = [msgspec.structs.replace(each, think_s=given.think * each.think_s) for each in requests]
    ideal, found = ideal_share(requests, LIVE_BLOCK), list[Turns]()
    with tempfile.TemporaryDirectory(prefix="twofold-agents-") as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, "-m", "twofold.cli.main", "model", "create", str(model)], check=True)
        for design, flags in LIVE.items():
            if design not in given.designs or (design == BEFORE and given.before is None):
                continue
            sources = {"PYTHONPATH": str(given.before.resolve())} if design == BEFORE else {}
            with (
                patch.dict(os.environ, sources),  # of the service
                served(model, [*flags, "--kv-cache-memory-bytes", "2GiB"]) as url,
            ):
                cached, timelines = asyncio.run(load(url, requests))
            found.append(of(design, cached, ideal, timelines))
    return found


class Ended(RequestSubscriber):
    """Collects the timelines of a simulation."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def follow(self, cluster: VirtualCluster) -> None:
        cluster.events.subscribe(self)

    def ended(self, timeline: Timeline, now: float) -> None:
        self.timelines.append(timeline)


def simulated(given: argparse.Namespace) -> list[Turns]:
    catalog, found = load_catalog(), list[Turns]()
    context = catalog.model(given.model).max_context
    requests = turns_of(given, given.rate or 1.0, max_model_len=context)
    ideal, prefill = ideal_share(requests, SIMULATED_BLOCK), given.prefill or given.machines // 2
    for design, (pools, router) in SIMULATED.items():
        spec = parse_cluster(
            pools.format(n=given.machines, p=prefill, d=given.machines - prefill), model=given.model, catalog=catalog
        )
        spec = msgspec.structs.replace(
            spec, router=router, performance="roofline", kv_cache=CacheSpec(dram="20000000 tokens")
        )
        ended = Ended()
        result = simulate(spec, requests, catalog=catalog, prepare=ended.follow)
        reuse = result.reuse
        cached = 0.0 if reuse is None else reuse.reused_tokens / reuse.prompt_tokens
        found.append(of(design, cached, ideal, ended.timelines))
    return found


def show(found: Sequence[Turns]) -> None:
    known = {each.design: each for each in found}
    base = next((known[design] for design in (BEFORE, ANSWERS_AGAIN, "split") if design in known), found[0])
    base_s = statistics.median(base.ttft_s)
    table = Table(
        "design", "cached", "infinite cache", "TTFT P50", f"of {base.design}", "TTFT P90", "TPOT P50", "TPOT P90"
    )
    for each in found:
        ttft, tpot = (statistics.quantiles(times, n=10) for times in (each.ttft_s, each.tpot_s))
        ratio = statistics.median(each.ttft_s) / base_s
        shares = f"{each.cached:.1%}", f"{each.ideal:.1%}"
        times = seconds(ttft[4]), f"{ratio:.2f}", seconds(ttft[8]), seconds(tpot[4]), seconds(tpot[8])
        table.add_row(each.design, *shares, *times)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("live", "simulated"))
    parser.add_argument("--turns", choices=("agent", "toolagent"), default="agent", help="workload")
    parser.add_argument("--requests", type=int, default=300, help="turns")
    parser.add_argument("--rate", type=float, help="turns per second")
    parser.add_argument("--scale", type=float, default=0.02, help="factor on the lengths of `live`")
    parser.add_argument("--think", type=float, default=0.05, help="factor on the think times of `live`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="sources of another version, also served live")
    parser.add_argument("--designs", nargs="+", choices=LIVE, default=LIVE, metavar="DESIGN", help="of `live`")
    parser.add_argument("--model", default="llama-3.1-70b", help="simulated model")
    parser.add_argument("--machines", type=int, default=4, help="simulated machines")
    parser.add_argument("--prefill", type=int, help="how many of them prefill (default: half)")
    parser.add_argument("--json", type=Path, help="file for all times")
    given = parser.parse_args()
    found = live(given) if given.where == "live" else simulated(given)
    show(found)
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")


if __name__ == "__main__":
    main()
