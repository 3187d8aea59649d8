"""Test for a timing side channel: whether TTFTs reveal the prompts of one tenant to another tenant.

Tenants A and B of a live service use different API keys. The script measures the TTFT of three kinds of
prompts:

- copied: B sends a prompt after A has sent the same prompt.
- new: B sends a prompt that neither tenant has sent before.
- repeated: A sends its own prompt again.

A permutation test (significance level 0.01) compares the TTFTs. The script exits with 1 in three cases:

- Copied and new prompts differ in TTFT, so B can recognize A's prompts.
- Repeated and new prompts do not differ in TTFT, so the test cannot detect cache hits.
- The service reports cached tokens to B, or too few cached tokens to A for a repeated prompt.

With `--counters`, only the reported numbers of cached tokens are checked.
"""

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from twofold.bench.client import Client, ClientConfig, Reply
from twofold.bench.endpoint import discover
from twofold.bench.prompts import token_range
from twofold.bench.services import served
from twofold.events import Recorder
from twofold.reporting.output import json_text
from twofold.reporting.summary import LatencyDistribution, seconds
from twofold.request import Request
from twofold.timeline import Timeline

KEYS = ("tenant-a", "tenant-b")
WARM_UP = 3  # uncounted pairs
PERMUTATIONS = 20_000
CHANCE = 0.01  # significance level


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one prompt: TTFT in seconds and number of cached prompt tokens."""

    ttft_s: float
    cached_tokens: int


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to the three prompts of one measurement round.

    Tenant B sends a prompt copied from tenant A, and a new prompt. Tenant A repeats one of its own prompts.
    """

    sent: Answer
    unsent: Answer
    own: Answer


class Tenant:
    """Client that sends prompts one after another with one tenant's API key."""

    def __init__(self, client: Client, timelines: list[Timeline]) -> None:
        self._client, self._timelines = client, timelines

    async def ask(self, prompt: list[int]) -> Answer:
        name = str(len(self._timelines))
        request = Request(id=name, arrival_s=0.0, prompt_tokens=len(prompt), output_tokens=1)
        reply = Reply()
        outcome = await self._client.send(request, self._client.body(request, prompt), reply)
        ttft_s = self._timelines[-1].ttft_s
        if outcome.error is not None or ttft_s is None or reply.usage is None:
            raise RuntimeError(f"{outcome.error}: {outcome.detail}")
        return Answer(ttft_s=ttft_s, cached_tokens=reply.usage.cached_tokens or 0)


async def measure(url: str, tokens: int, pairs: int) -> list[Pair]:
    """Send prompts of both tenants, one request at a time, and return the answers without those of the warm-up."""
    endpoint = await discover(url, api_key=KEYS[0])
    draw, (low, end) = random.Random(0), token_range(endpoint.vocab_size)

    def fresh() -> list[int]:
        return [draw.randrange(low, end) for _ in range(tokens)]

    async with AsyncExitStack() as stack:
        tenants = []
        for key in KEYS:
            timelines: list[Timeline] = []
            client = Client(endpoint, Recorder([timelines.append]), ClientConfig(), api_key=key)
            tenants.append(Tenant(await stack.enter_async_context(client), timelines))
        a, b = tenants
        found = []
        for _ in range(WARM_UP + pairs):
            answers = {}
            for kind in draw.sample(("sent", "unsent"), 2):
                prompt = fresh()
                await a.ask(prompt)
                answers[kind] = await b.ask(prompt if kind == "sent" else fresh())
            prompt = fresh()
            await a.ask(prompt)
            found.append(Pair(sent=answers["sent"], unsent=answers["unsent"], own=await a.ask(prompt)))
    return found[WARM_UP:]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Statistical comparison of two paired samples of TTFTs.

    `p` is the p-value. `told` is the probability that a TTFT of the first sample is lower than a TTFT of the
    second sample. `median_s` is the median difference in seconds, and `error_s` is its standard error.
    """

    p: float
    told: float  # 0.5: indistinguishable
    median_s: float
    error_s: float


def compare(first_s: list[float], second_s: list[float]) -> Comparison:
    """Compare two paired samples of TTFTs with a permutation test of the TTFT ranks."""
    first, second = np.array(first_s), np.array(second_s)
    _, place, counts = np.unique(np.concatenate([first, second]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    differences = ranks[: len(first)] - ranks[len(first) :]
    draw = np.random.default_rng(0)
    signs = draw.choice((-1.0, 1.0), size=(PERMUTATIONS, len(first)))
    as_far = np.abs(signs @ differences) >= abs(differences.sum()) * (1 - 1e-12)
    below = (first[:, None] < second[None, :]).mean() + (first[:, None] == second[None, :]).mean() / 2
    apart = second - first
    medians = [statistics.median(apart[draw.integers(0, len(apart), len(apart))].tolist()) for _ in range(1000)]
    return Comparison(
        p=float((1 + as_far.sum()) / (1 + PERMUTATIONS)),
        told=float(below),
        median_s=statistics.median(apart.tolist()),
        error_s=statistics.stdev(medians),
    )


def tables(found: list[Pair]) -> tuple[Table, Table, list[Comparison]]:
    kinds = {
        "B, prompt sent by A": [pair.sent for pair in found],
        "B, fresh prompt": [pair.unsent for pair in found],
        "A, own prompt repeated": [pair.own for pair in found],
    }
    times = Table(title=f"TTFT, {len(found)} interleaved pairs", title_justify="left")
    for heading in ("", "p10", "median", "p90", "p99", "mean", "tokens cached"):
        times.add_column(heading, justify="right" if heading else "left")
    for name, answers in kinds.items():
        ttft_s = [answer.ttft_s for answer in answers]
        whole = LatencyDistribution.of(ttft_s)
        assert whole is not None  # noqa: S101  (there is at least one pair; for the type checker)
        p10 = float(np.percentile(ttft_s, 10))
        cells = [seconds(value) for value in (p10, whole.p50, whole.p90, whole.p99, whole.mean)]
        times.add_row(name, *cells, f"{sum(answer.cached_tokens for answer in answers):,}")
    sent, unsent, own = ([answer.ttft_s for answer in answers] for answers in kinds.values())
    comparisons = [compare(sent, unsent), compare(own, unsent)]
    tests = Table(title="Distinguishable?", title_justify="left")
    for heading in ("", "p", "right guesses", "median difference", "standard error"):
        tests.add_column(heading, justify="right" if heading else "left")
    for name, each in zip(("sent by A or fresh", "control: own or new"), comparisons, strict=True):
        ms = (f"{1e3 * value:.3f} ms" for value in (each.median_s, each.error_s))
        tests.add_row(name, f"{each.p:.4f}", f"{each.told:.1%}", *ms)
    return times, tests, comparisons


def counters_right(found: list[Pair], tokens: int) -> bool:
    """Return whether the service reports cached tokens for all repeated prompts of tenant A, and none for tenant B."""
    strangers = [answer.cached_tokens for pair in found for answer in (pair.sent, pair.unsent)]
    return not any(strangers) and all(pair.own.cached_tokens >= tokens // 2 for pair in found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--counters", action="store_true", help="check reported token counts only")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("flags", nargs="*", help="flags of twofold serve, after --")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the service
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-tenants-")))
        model = given.model or folder / "model"
        if given.model is None:
            command = [sys.executable, "-m", "twofold.cli.main", "model", "create", str(model)]
            subprocess.run(command, check=True)
        flags = given.flags or ["--prefill", "1", "--decode", "1"]
        keys = [word for key in KEYS for word in ("--api-key", key)]
        url = stack.enter_context(served(model, [*flags, *keys]))
        found = asyncio.run(measure(url, given.tokens, given.pairs))
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")
    console = Console(width=110)
    times, tests, (leak, control) = tables(found)
    console.print(times)
    right = counters_right(found, given.tokens)
    console.print(f"tokens cached: {'as expected' if right else 'NOT as expected'}")
    if given.counters:
        return 0 if right else 1
    console.print(tests)
    apart = leak.p < CHANCE
    console.print(
        f"B {'CAN tell' if apart else 'cannot tell'} whether A sent it; a median difference of "
        f"{3.4e3 * leak.error_s:.2f} ms would be detected with 80% probability. "
        f"A {'can tell' if control.p < CHANCE else 'CANNOT tell'} its own."
    )
    return 0 if right and not apart and control.p < CHANCE else 1


if __name__ == "__main__":
    sys.exit(main())
