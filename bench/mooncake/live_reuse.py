"""Measure the TTFT of prompts with a cached prefix on a live service, relative to uncached prompts.

Requests are sequential; figures are medians over rounds. With 95% of a prompt cached, the TTFT must be at
most a fifth of the uncached TTFT. Otherwise the script exits with 1. Arguments after `--` are flags of
`twofold serve`.
"""

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.client import Client, ClientConfig
from twofold.bench.endpoint import discover
from twofold.bench.prompts import token_range
from twofold.bench.services import served
from twofold.events import Recorder
from twofold.reporting.output import json_text
from twofold.reporting.summary import seconds
from twofold.request import Request
from twofold.timeline import Timeline

SHARES = (0.0, 0.5, 0.95)
GOAL_SHARE, GOAL_RATIO = 0.95, 0.2


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """TTFTs in seconds at one prompt length: without cached KV, and for each cached fraction of the prompt."""

    prompt_tokens: int
    cold_s: list[float]
    warm_s: dict[float, list[float]]

    def ratio(self, share: float) -> float:
        """Return the median TTFT with cached KV, divided by the median TTFT without cached KV.

        `share` is the cached fraction of the prompt.
        """
        return statistics.median(self.warm_s[share]) / statistics.median(self.cold_s)


class PromptSender:
    """Client that sends prompts of random tokens one after another and measures their TTFT."""

    def __init__(self, client: Client, timelines: list[Timeline], vocabulary: int | None) -> None:
        self._client, self._timelines = client, timelines
        self._lowest, self._end = token_range(vocabulary)
        self._draw = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._lowest, self._end) for _ in range(count)]

    async def ttft_s(self, prompt: list[int]) -> float:
        request = Request(id=str(len(self._timelines)), arrival_s=0.0, prompt_tokens=len(prompt), output_tokens=1)
        outcome = await self._client.send(request, self._client.body(request, prompt))
        ttft_s = self._timelines[-1].ttft_s
        if outcome.error is not None or ttft_s is None:
            raise RuntimeError(f"{outcome.error}: {outcome.detail}")
        return ttft_s


async def measure(url: str, lengths: list[int], rounds: int) -> list[Reuse]:
    """Measure the TTFT of prompts of each length, uncached and with cached prefixes."""
    endpoint, timelines = await discover(url), list[Timeline]()
    found = [Reuse(prompt_tokens=n, cold_s=[], warm_s={share: [] for share in SHARES}) for n in lengths]
    async with Client(endpoint, Recorder([timelines.append]), ClientConfig()) as client:
        asker = PromptSender(client, timelines, endpoint.vocab_size)
        for number in range(rounds + 1):
            for reuse in found:
                cold_s = await asker.ttft_s(asker.tokens(reuse.prompt_tokens))
                warm_s = {share: await _warm_s(asker, reuse.prompt_tokens, share) for share in SHARES}
                if number:
                    reuse.cold_s.append(cold_s)
                    for share in SHARES:
                        reuse.warm_s[share].append(warm_s[share])
    return found


async def _warm_s(asker: PromptSender, prompt_tokens: int, share: float) -> float:
    beginning = asker.tokens(round(prompt_tokens * share))
    if beginning:
        await asker.ttft_s(beginning)
    return await asker.ttft_s(beginning + asker.tokens(prompt_tokens - len(beginning)))


def table(found: list[Reuse]) -> Table:
    drawn = Table(title="TTFT by cached share of the prompt, and relative to a cold prompt")
    drawn.add_column("prompt tokens", justify="right")
    drawn.add_column("cold", justify="right")
    for share in SHARES:
        drawn.add_column(f"{share:.0%} cached", justify="right")
    for reuse in found:
        warm = [f"{seconds(statistics.median(reuse.warm_s[share]))}, {reuse.ratio(share):.1%}" for share in SHARES]
        drawn.add_row(f"{reuse.prompt_tokens:,}", seconds(statistics.median(reuse.cold_s)), *warm)
    return drawn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4000], help="prompt tokens")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("flags", nargs="*", help="flags of twofold serve, after --")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the service
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-reuse-")))
        model = given.model or folder / "model"
        if given.model is None:
            command = [sys.executable, "-m", "twofold.cli.main", "model", "create", str(model)]
            subprocess.run(command, check=True)
        url = stack.enter_context(served(model, given.flags or ["--prefill", "1", "--decode", "1"]))
        found = asyncio.run(measure(url, given.lengths, given.rounds))
    console = Console()
    console.print(table(found))
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")
    worst = max(reuse.ratio(GOAL_SHARE) for reuse in found)
    console.print(f"{GOAL_SHARE:.0%} cached: at most {worst:.1%} of cold; the goal is {GOAL_RATIO:.0%}")
    return 0 if worst <= GOAL_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
