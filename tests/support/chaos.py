"""Fault injection into a service while clients stream responses."""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from enum import StrEnum

import aiohttp
import jsonschema
import psutil

from support.api_client import complete, metric, served_name
from support.running_service import named

DEADLINE_S = 240  # timeout of every request
# Sampling that depends on the tokens before, which a replay has to restore.
PENALIZED = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "min_p": 0.01,
    "logit_bias": {"17": 2.0, "18": -3.0},
}
# An output that does not end early, unlike those of most constraints, and one that ends and must be valid then.
WORDS = {"structured_outputs": {"regex": "([a-z]{1,9} ){60}"}}
SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 2}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}}
JSON |= {"max_tokens": 400, "ignore_eos": False}
TURNS = 4  # questions that have a second turn after their answer
HANG_S = DEADLINE_S + 120  # client timeout; a response of any kind must arrive within it


class Fault(StrEnum):
    """A way in which a test kills, stops or pauses a worker process with signals."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    PAUSE = "SIGSTOP, later SIGCONT"  # may be too short to be detected, or long enough for a replacement


class Chaos:
    """Test tool that kills, stops and pauses workers of a service while clients check streamed completions."""

    def __init__(self, process, url, roles, *, clients=5, seed=1, constrains=True):
        self.process, self.url, self.roles, self.clients = process, url, roles, clients
        self.draw = random.Random(seed)
        self.over = False
        self.answered = self.left = self.valid = 0
        self.answers, self.wrong, self.waking = [], [], set()
        self.faults, self.lost, self.alive = Counter(), {}, Counter()
        self.questions = [
            {
                "prompt": [self.draw.randint(10, 500) for _ in range(self.draw.randint(1, 300))],
                "max_tokens": self.draw.randint(1, 60),
                "temperature": self.draw.choice([0.0, 1.0]),
                "seed": number,
                "ignore_eos": True,
                "timeout": DEADLINE_S,
                **(PENALIZED if number % 2 else {}),
                **((JSON if number > 3 else WORDS) if constrains and number % 4 > 1 else {}),
            }
            for number in range(8)
        ]

    async def learn(self):
        async with aiohttp.ClientSession() as session:
            self.answers = [await complete(session, self.url, **question) for question in self.questions]
            pairs = list(zip(self.questions, self.answers, strict=True))
            following = [
                {**asked, "prompt": asked["prompt"] + answer + asked["prompt"][:9]} for asked, answer in pairs[:TURNS]
            ]
            self.questions += following
            self.answers += [await complete(session, self.url, **question) for question in following]

    async def run(self, rounds):
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:
            name = await served_name(session, self.url)
            for _ in range(self.clients):
                tasks.create_task(self._client(session, name))
            for number in range(rounds):
                role = self.roles[number % len(self.roles)]
                fault = list(Fault)[number // len(self.roles) % len(Fault)]
                await self._inject(session, role, fault)
                enough = self.answered + self.clients
                while self.answered < enough:  # noqa: ASYNC110 (several tasks change it)
                    await asyncio.sleep(0.02)
            self.over = True
        await asyncio.gather(*self.waking)
        for stage in ("prompt", "hand-off", "decode"):
            name = f'request_replays_total{{stage="{stage}"}}'
            self.lost[stage] = int(await asyncio.to_thread(metric, self.url, name))

    def report(self):
        hits = ", ".join(f"{role} {fault}: {count}" for (role, fault), count in sorted(self.faults.items()))
        return (
            f"\n{self.answered} responses, {len(self.wrong)} incorrect; {self.left} clients disconnected early"
            f"\n{self.valid} responses in JSON were valid"
            f"\nfaults: {hits}\nrunning requests by phase: {dict(self.alive)}\nlost attempts by stage: {self.lost}"
        )

    async def _client(self, session, name):
        """Stream completions, cancel some of the streams early, and record incorrect outputs."""
        while not self.over:
            number = self.draw.randrange(len(self.questions))
            leave_after = self.draw.randrange(60) if self.draw.random() < 0.1 else None
            # Raises TimeoutError if the stream hangs.
            got, text, reason, ended = await asyncio.wait_for(
                self._stream(session, {"model": name, **self.questions[number]}, leave_after), HANG_S
            )
            self.left += not ended
            self.answered += ended
            right = self.answers[number] if ended else self.answers[number][: len(got)]
            if got != right:
                self.wrong.append((number, got, right))
            if reason == "stop" and "response_format" in self.questions[number]:
                jsonschema.validate(json.loads(text), SCHEMA)
                self.valid += 1

    async def _stream(self, session, body, leave_after):
        """Return the tokens of a stream, its text, its finish reason, and whether it finished."""
        body = {**body, "stream": True, "return_token_ids": True}
        tokens, text, reason = [], "", None
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.strip() == b"data: [DONE]":
                    return tokens, text, reason, True
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    (choice,) = event["choices"]
                    tokens, text, reason = tokens + choice["token_ids"], text + choice["text"], choice["finish_reason"]
                if leave_after is not None and len(tokens) > leave_after:
                    return tokens, text, reason, False
        raise AssertionError(f"the stream broke off after {len(tokens)} tokens")

    async def _inject(self, session, role, fault):
        await asyncio.sleep(self.draw.uniform(0.0, 0.5))
        async with session.get(f"{self.url}/dashboard/data") as response:
            self.alive.update((await response.json())["phases"])
        while (victim := self._send(role, fault)) is None:  # noqa: ASYNC110 (restarts back off)
            await asyncio.sleep(0.02)
        self.faults[role, str(fault)] += 1
        if fault is Fault.PAUSE:
            wakes = asyncio.create_task(_wake(victim.pid, self.draw.uniform(0.1, 2.5)))
            self.waking.add(wakes)

    def _send(self, role, fault):
        with suppress(psutil.NoSuchProcess):  # a process ended because of an earlier fault
            able = [one for one in named(self.process, f"{role}.*") if _runs(one)]
            if able:
                victim = self.draw.choice(able)
                victim.send_signal(signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)
                return victim
        return None


def _runs(process):
    return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


async def _wake(pid, after_s):
    await asyncio.sleep(after_s)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
