"""Capacity of a service: the throughput of a burst, the longest prompt that it accepts, and its idle metrics."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from twofold.request import Request
from twofold.torture.config import TortureConfig
from twofold.torture.metrics import ServiceMetrics, leaks, read_metrics
from twofold.torture.prompts import TorturePrompt
from twofold.torture.streams import ClientBehaviour, Ending, TortureClient, TortureStream

_BURST: Final = ClientBehaviour(name="burst")
_BURST_PROMPTS: Final = 2  # for each client
_RECOVERED: Final = 0.9  # of the throughput before
_REPORT_S: Final = 1.0  # within which servers update their metrics
_STEPS: Final = 64  # resolution of the longest prompt


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of a burst, longest accepted prompt (None: not searched), and metrics (None: the service has none)."""

    tokens_per_s: float
    longest_prompt: int | None
    metrics: ServiceMetrics | None


UNMEASURED: Final = Capacity(tokens_per_s=0.0, longest_prompt=None, metrics=None)


@dataclass(slots=True)
class CapacityProbe:
    """Measures the capacity of a service without other load, with bursts of `prompts`, and adds their `streams`."""

    config: TortureConfig
    client: TortureClient
    prompts: Sequence[TorturePrompt]
    streams: list[TortureStream]
    bursts: Iterator[int] = field(default_factory=count)

    async def measure(self, before: Capacity | None = None) -> Capacity:
        """Measure the capacity until it is `before` (None: the first) and the service is idle, at most `settle_s`."""
        over_s, best = time.monotonic() + self.config.settle_s, 0.0
        idle = ServiceMetrics() if before is None or before.metrics is None else before.metrics
        while True:
            # The engines of vLLM update their metrics with requests only, so bursts precede every reading.
            best = max(best, await self._burst())
            await asyncio.sleep(min(_REPORT_S, self.config.settle_s))
            metrics = await self._metrics()
            recovered = before is None or best >= _RECOVERED * before.tokens_per_s
            if time.monotonic() >= over_s or (recovered and not (metrics and leaks(idle, metrics))):
                break
        longest = await self._longest(None if before is None else before.longest_prompt)
        return Capacity(tokens_per_s=best, longest_prompt=longest, metrics=metrics)

    async def _metrics(self) -> ServiceMetrics | None:
        urls = self.config.metrics or (self.config.endpoint.base_url,)
        return await read_metrics(urls, self.config.api_key)

    async def _burst(self) -> float:
        """Return the tokens per second of prompts that no cache has."""
        clients = self.config.concurrency
        salt = f"torture-{self.config.prompts.seed}-{next(self.bursts)}"
        left = iter([self.prompts[number % len(self.prompts)] for number in range(_BURST_PROMPTS * clients)])
        streams: list[TortureStream] = []

        async def send() -> None:
            for prompt in left:  # shared by the clients
                streams.append(await self.client.stream(prompt, _BURST, cache_salt=salt))  # noqa: PERF401  (several tasks append)

        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(send())
        self.streams += streams
        tokens = sum(len(stream.reply.token_times_s()) for stream in streams if stream.ending is Ending.COMPLETE)
        return tokens / (time.monotonic() - started_s)

    async def _longest(self, expected: int | None) -> int | None:
        """Return the length of the longest accepted prompt; try the expected length first."""
        context = self.config.endpoint.max_model_len
        limits = (self.config.longest_prompt, None if context is None else context - 1)
        high = min((limit for limit in limits if limit is not None), default=0)
        if high < 1:
            return None
        if await self._accepts(expected or high):
            return expected or high
        low, high = 0, expected or high
        while high - low > max(self.config.prompts.block_tokens, high // _STEPS):
            middle = (low + high) // 2
            low, high = (middle, high) if await self._accepts(middle) else (low, middle)
        return low

    async def _accepts(self, tokens: int) -> bool:
        request = Request(id=f"torture-longest-{tokens}", arrival_s=0.0, prompt_tokens=tokens, output_tokens=1)
        prompt = TorturePrompt(number=-1, request=request, prompt=self.config.prompts.prompt(request))
        return (await self.client.stream(prompt)).ending is Ending.COMPLETE
