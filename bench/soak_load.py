"""Load of the soak test: requests of many sizes; one in ten clients disconnects early."""

import asyncio
import random
import statistics
import time
from collections import Counter

from twofold.bench.client import Client
from twofold.bench.prompts import PromptMaker
from twofold.request import FinishReason, Request
from twofold.timeline import Timeline

PROMPT, OUTPUT = (16, 512), (4, 96)  # tokens
LEAVES = 0.1
AT_ONCE = 24


class Load:
    """Client that loads a service with requests of random sizes from one seed."""

    def __init__(self, client: Client, prompts: PromptMaker, ends: dict[str, Timeline], seed: int) -> None:
        self._client, self._prompts, self._ends = client, prompts, ends
        self._draw = random.Random(seed)
        self._number = 0
        self._stay_s = 1.0  # maximum time until an early disconnect
        self.ended: Counter[str] = Counter()

    async def capacity(self, seconds: float) -> float:
        """Keep `AT_ONCE` requests in flight for `seconds`, and return how many end per second."""
        over_s = time.monotonic() + seconds
        ended_s: list[float] = []
        stays: list[float] = []

        async def keep_asking() -> None:
            while (began := time.monotonic()) < over_s:
                await self._one()
                ended_s.append(time.monotonic())
                stays.append(ended_s[-1] - began)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(keep_asking())
        begin_s = over_s - 0.7 * seconds  # ramp-up ends here
        self._stay_s = statistics.median(stays)
        return sum(begin_s <= at < over_s for at in ended_s) / (0.7 * seconds)

    async def run(self, rate_per_s: float, seconds: float) -> None:
        """Send requests with Poisson arrivals for `seconds`."""
        slots = asyncio.Semaphore(8 * AT_ONCE)  # avoids rejections
        due_s = time.monotonic()
        over_s = due_s + seconds

        async def in_turn() -> None:
            try:
                await self._one()
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            while (due_s := due_s + self._draw.expovariate(rate_per_s)) < over_s:
                await asyncio.sleep(due_s - time.monotonic())
                await slots.acquire()
                tasks.create_task(in_turn())

    async def _one(self) -> None:
        self._number += 1
        request = Request(
            id=f"soak-{self._number}",
            arrival_s=0.0,
            prompt_tokens=self._draw.randint(*PROMPT),
            output_tokens=self._draw.randint(*OUTPUT),
        )
        leaves = self._draw.random() < LEAVES
        body = self._client.body(request, self._prompts.prompt(request))
        sending = asyncio.create_task(self._client.send(request, body))
        # Upper bound for requests that stay.
        await asyncio.wait({sending}, timeout=self._draw.uniform(0.0, 1.5 * self._stay_s) if leaves else None)
        if not sending.done():
            sending.cancel()
            await asyncio.wait({sending})
        timeline = self._ends.pop(request.id)
        if sending.cancelled():
            self.ended["left"] += 1
            return
        error = sending.result().error
        whole = timeline.output_tokens == request.output_tokens and timeline.finish_reason is FinishReason.LENGTH
        self.ended[error or ("whole" if whole else "an output of wrong length")] += 1
