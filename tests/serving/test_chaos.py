"""Workers are killed and stopped at random under load, and no client notices.

TWOFOLD_CHAOS_ROUNDS says how many times; a few without it.
"""

import asyncio
import os
import random
import signal
from contextlib import suppress

import aiohttp
import psutil
import pytest

from support.api_client import all_blocks_free, complete
from support.flags import ENGINE
from support.running_service import children, running_service
from support.transports import NIXL

ROUNDS = int(os.environ.get("TWOFOLD_CHAOS_ROUNDS", "3"))
CLIENTS = 5
PULLED = ("--handoff", "pull", "--kv-checksums")
KINDS = (signal.SIGKILL, signal.SIGSTOP)


class Chaos:
    """Clients that stream known answers, while workers end. All that is random comes from one seed."""

    def __init__(self, process, url, seed=1):
        self.process, self.url = process, url
        self.draw = random.Random(seed)
        self.over = False
        self.answered = 0
        self.wrong = []
        self.questions = [
            {
                "prompt": [self.draw.randint(10, 500) for _ in range(self.draw.randint(1, 300))],
                "max_tokens": self.draw.randint(1, 60),
                "temperature": self.draw.choice([0.0, 1.0]),
                "seed": number,
                "ignore_eos": True,
            }
            for number in range(8)
        ]

    async def run(self, rounds):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            answers = [await complete(session, self.url, **question) for question in self.questions]
            clients = [asyncio.create_task(self.ask(session, answers)) for _ in range(CLIENTS)]
            for number in range(rounds):
                await self.hit(KINDS[number % len(KINDS)])
                answered = self.answered
                while self.answered < answered + CLIENTS:  # noqa: ASYNC110 (what it waits for is many tasks)
                    await asyncio.sleep(0.02)
            self.over = True
            await asyncio.gather(*clients)

    async def ask(self, session, answers):
        """One question after the other, each answered as it was when nothing happened."""
        while not self.over:
            number = self.draw.randrange(len(self.questions))
            answer = await complete(session, self.url, **self.questions[number])
            self.answered += 1
            if answer != answers[number]:
                self.wrong.append((number, answer, answers[number]))

    async def hit(self, kind):
        await asyncio.sleep(self.draw.uniform(0.0, 0.5))
        workers = [
            child
            for child in children(self.process)
            if child.name().startswith(("prefill", "decode", "mixed"))
        ]
        with suppress(psutil.NoSuchProcess):  # it ended just now, from what was done to it before
            self.draw.choice(workers).send_signal(kind)


async def everybody_is_back(process, workers):
    """Whether there come to be as many processes as before: a worker may still be in its back-off."""
    for _ in range(600):
        if len(children(process)) == workers:
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "flags",
    [
        ("--prefill", "2", "--decode", "1"),
        ("--prefill", "1", "--decode", "1", "--router", "splitwise"),
        ("--colocated", "2"),
        pytest.param(("--prefill", "1", "--decode", "2", *PULLED, "--transport", "nixl"), marks=NIXL),
    ],
    ids=["split", "roles move", "colocated", "pulled over nixl"],
)
def test_no_client_notices_that_workers_end(flags, tiny_model_dir):
    """Every answer is whole and the same, and in the end nothing is held: blocks, memory, sockets, processes."""
    with running_service(tiny_model_dir("llama"), *ENGINE, *flags) as (process, url):
        workers = len(children(process))
        chaos = Chaos(process, url)
        asyncio.run(asyncio.wait_for(chaos.run(ROUNDS), 120 + 60 * ROUNDS))
        assert chaos.wrong == []
        assert chaos.answered >= CLIENTS * ROUNDS
        assert asyncio.run(all_blocks_free(url))
        assert asyncio.run(everybody_is_back(process, workers)), "a worker that ended is started again"
