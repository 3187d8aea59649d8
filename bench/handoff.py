"""Measure the visible transfer, which is the part of a KV hand-off after the first token.

Two network namespaces represent two hosts, so the script needs root. The link between the hosts runs at 1
Gbit/s, then at 200 Mbit/s. A process on the first host prefills prompts with Twofold's torch engine. NIXL
sends the KV over TCP into the memory of a process on the second host. The script prints median times for each
hand-off mode and prompt length. The script also measures the delay of the second token in a service whose
prefill and decode workers share memory.

The script exits with 0 if two conditions hold at every link speed and prompt length, and otherwise with 1:
- The hand-off mode that `auto` chooses has at most 5% more visible transfer than the best mode.
- Layer-wise hand-off has a visible transfer of at most one layer's transfer time plus 10%. This condition
  applies only if computing a layer takes longer than sending the layer.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from handoff_ends import BLOCK_SIZE, HandoffRequest, HandoffTimes, StartupFacts
from second_token import SecondToken, second_token
from two_hosts import TwoHosts, two_hosts
from twofold.cluster.paths import KvEgress, ModelledPaths
from twofold.errors import UserError
from twofold.events import Route
from twofold.handoff import HandoffMode
from twofold.reporting.output import json_text
from twofold.reporting.summary import seconds
from twofold.request import Request
from twofold.scheduling.cluster.scheduler import AutoHandoff
from twofold.transport.base import MemoryDescriptor

MODES = (HandoffMode.SERIALIZED, HandoffMode.LAYER_WISE)
LINKS_BITS_PER_S = (1_000_000_000, 200_000_000)
PROMPTS = (128, 256, 512, 1024, 2048, 4096)
SLACK, WORSE = 1.10, 1.05

T = TypeVar("T")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Median times for one prompt length on one link."""

    tokens: int
    prefill_s: float
    layer_s: float  # transfer time of one layer
    visible_s: dict[HandoffMode, float]
    chosen: HandoffMode
    covered: bool  # whether computing a layer takes longer than its transfer

    @property
    def hidden(self) -> bool:
        # Compute cannot hide the transfer of a layer that takes longer to send than to compute.
        return not self.covered or self.visible_s[HandoffMode.LAYER_WISE] <= SLACK * self.layer_s

    @property
    def well_chosen(self) -> bool:
        return self.visible_s[self.chosen] <= WORSE * min(self.visible_s.values())


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    bits_per_s: int
    facts: StartupFacts
    cells: list[Cell]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    links: list[LinkReport]
    second_token: SecondToken


class End:
    """Process on one host that prefills or decodes, controlled by JSON lines."""

    def __init__(self, hosts: TwoHosts, host: int, role: str, model: Path) -> None:
        cores = sorted(os.sched_getaffinity(0))
        blocks = -(-max(PROMPTS) // BLOCK_SIZE)
        script = Path(__file__).with_name("handoff_ends.py")
        command = [sys.executable, str(script), role, str(model), str(blocks), str(cores[host % len(cores)])]
        env = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": hosts.devices[host]}
        self.process = subprocess.Popen(
            hosts.command(host, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def say(self, message: msgspec.Struct) -> None:
        assert self.process.stdin is not None  # noqa: S101  (created as a pipe above)
        self.process.stdin.write(msgspec.json.encode(message).decode() + "\n")
        self.process.stdin.flush()

    def hear(self, kind: type[T]) -> T:
        assert self.process.stdout is not None  # noqa: S101  (created as a pipe above)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"one end exited with code {self.process.wait()}")
        return msgspec.json.decode(line, type=kind)


@contextmanager
def two_ends(hosts: TwoHosts, model: Path) -> Iterator[tuple[End, StartupFacts]]:
    """Start and connect the prefill and the decode process."""
    ends: list[End] = []
    try:
        for host, role in enumerate(("prefill", "decode")):
            ends.append(End(hosts, host, role, model))
        prefill, decode = ends
        prefill.say(decode.hear(MemoryDescriptor))
        yield prefill, prefill.hear(StartupFacts)
    finally:
        for end in ends:
            end.process.kill()
            end.process.wait()


def measure(hosts: TwoHosts, model: Path, bits_per_s: int, rounds: int) -> LinkReport:
    """Measure hand-offs by prompt length and hand-off mode over a link of `bits_per_s`, repeated `rounds` times."""
    hosts.limit(bits_per_s)
    seen: dict[tuple[int, HandoffMode], list[HandoffTimes]] = {}
    with two_ends(hosts, model) as (prefill, facts):
        for number in range(rounds):
            for tokens in PROMPTS:
                for mode in MODES if number % 2 else reversed(MODES):
                    prefill.say(HandoffRequest(tokens=tokens, mode=mode))
                    seen.setdefault((tokens, mode), []).append(prefill.hear(HandoffTimes))
            print(f"{bits_per_s / 1e6:,.0f} Mbit/s: round {number + 1} of {rounds}", flush=True)
    cells = [cell(facts, tokens, {mode: seen[tokens, mode] for mode in MODES}) for tokens in PROMPTS]
    return LinkReport(bits_per_s=bits_per_s, facts=facts, cells=cells)


def cell(facts: StartupFacts, tokens: int, seen: dict[HandoffMode, list[HandoffTimes]]) -> Cell:
    prefill_s = statistics.median(each.prefill_s for runs in seen.values() for each in runs)
    layer_s = facts.link.overhead_s + (tokens * facts.kv_bytes_per_token / facts.layers / facts.link.bytes_per_s)
    path = facts.link.transfer(facts.kv_bytes_per_token, facts.layers)
    paths = ModelledPaths({"prefill-0": KvEgress(path, facts.prefill.seconds)})
    request = Request(id="r", arrival_s=0.0, prompt_tokens=tokens, output_tokens=2)
    return Cell(
        tokens=tokens,
        prefill_s=prefill_s,
        layer_s=layer_s,
        visible_s={mode: statistics.median(each.visible_s for each in runs) for mode, runs in seen.items()},
        chosen=AutoHandoff(paths).choose(request, Route("prefill-0", "decode-0")),
        covered=prefill_s / facts.layers > layer_s,
    )


def table(link: LinkReport) -> Table:
    carried = link.facts.link.bytes_per_s * 8 / 1e6
    drawn = Table(
        title=f"Visible hand-off at {link.bits_per_s / 1e6:,.0f} Mbit/s ({carried:,.0f} as measured, "
        f"{seconds(link.facts.link.overhead_s)} a transfer)",
        title_justify="left",
    )
    for heading in ("prompt", "prefill", "a layer", "at once", "by layer", "chosen", "covered", ""):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for each in link.cells:
        drawn.add_row(
            f"{each.tokens:,}",
            seconds(each.prefill_s),
            seconds(each.layer_s),
            *(seconds(each.visible_s[mode]) for mode in MODES),
            each.chosen.value,
            "yes" if each.covered else "no",
            "" if each.hidden and each.well_chosen else "✗",
        )
    return drawn


def violations(report: Report) -> list[str]:
    """Return one sentence per expectation that the results violate."""
    found = []
    for link in report.links:
        for each in link.cells:
            where = f"{each.tokens:,} tokens at {link.bits_per_s / 1e6:,.0f} Mbit/s"
            if not each.hidden:
                found.append(f"{where}: layer-wise leaves more than one layer's transfer + 10%")
            if not each.well_chosen:
                found.append(f"{where}: {each.chosen.value} is auto's choice and over 5% worse")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the processes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-handoff-")))
        model = given.model or folder / "model"
        if given.model is None:
            subprocess.run([sys.executable, "-m", "twofold.cli.main", "model", "create", str(model)], check=True)
        try:
            hosts = stack.enter_context(two_hosts())
        except UserError as error:
            sys.exit(f"{error}")
        links = [measure(hosts, model, speed, given.rounds) for speed in LINKS_BITS_PER_S]
        report = Report(rounds=given.rounds, links=links, second_token=second_token(model, given.rounds))
    console = Console()
    for link in links:
        console.print(table(link))
    console.print(report.second_token.sentence())
    if given.json is not None:
        given.json.write_text(json_text(report), "utf-8")
    wrong = violations(report)
    for each in wrong:
        print(f"✗ {each}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
