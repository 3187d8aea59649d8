"""Measure how much later the second token arrives when prefill and decode run on separate workers."""

import asyncio
import statistics
from pathlib import Path

import msgspec

from twofold.bench.client import Client, ClientConfig
from twofold.bench.endpoint import discover
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import served
from twofold.events import Recorder
from twofold.request import Request
from twofold.timeline import Timeline

# Two workers each, so that every worker has the same number of cores.
SERVICES = {"split": ["--prefill", "1", "--decode", "1"], "colocated": ["--colocated", "2"]}
PROMPT_TOKENS, OUTPUT_TOKENS, TIMES = 512, 24, 4


class SecondToken(msgspec.Struct, frozen=True, kw_only=True):
    """Median times in seconds from a comparison of a split service with a colocated service.

    `gap_s` maps a service's name to the time between the first two output tokens. `step_s` is the time of a
    decode step in the split service.
    """

    gap_s: dict[str, float]
    step_s: float

    @property
    def extra_steps(self) -> float:
        return (self.gap_s["split"] - self.gap_s["colocated"]) / self.step_s

    def sentence(self) -> str:
        return (
            f"shared memory, {PROMPT_TOKENS} tokens: the second token of a split service is "
            f"{self.extra_steps:+.2f} decode steps ({(self.gap_s['split'] - self.gap_s['colocated']) * 1e3:+.1f} ms) "
            "later than that of a colocated one"
        )


def second_token(model: Path, rounds: int) -> SecondToken:
    """Measure the delay of the second token in a split and in a colocated service, with sequential requests."""
    gaps: dict[str, list[float]] = {name: [] for name in SERVICES}
    steps: list[float] = []
    for _ in range(max(1, rounds // 2)):
        for name, flags in SERVICES.items():
            with served(model, flags) as url:
                timelines = asyncio.run(ask(url, PROMPT_TOKENS))
            gaps[name] += [timeline.itl_s[0] for timeline in timelines]
            if name == "split":
                steps += [gap for timeline in timelines for gap in timeline.itl_s[1:]]
    return SecondToken(
        gap_s={name: statistics.median(each) for name, each in gaps.items()}, step_s=statistics.median(steps)
    )


async def ask(url: str, prompt_tokens: int) -> list[Timeline]:
    """Send sequential requests and return their timelines."""
    endpoint = await discover(url)
    lowest, vocabulary = token_range(endpoint.vocab_size)
    prompts, timelines = PromptMaker(seed=0, lowest=lowest, vocabulary=vocabulary), list[Timeline]()
    async with Client(endpoint, Recorder([timelines.append]), ClientConfig()) as client:
        for number in range(TIMES + 1):
            request = Request(id=str(number), arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=OUTPUT_TOKENS)
            outcome = await client.send(request, client.body(request, prompts.prompt(request)))
            if outcome.error is not None:
                raise RuntimeError(f"{url}: {outcome.error}: {outcome.detail}")
    return timelines[1:]
