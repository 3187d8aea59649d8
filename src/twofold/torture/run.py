"""Run of a fault suite: reference answers, capacity, load with faults, and capacity again."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from twofold.bench.client import Client, ClientConfig
from twofold.bench.endpoint import Endpoint
from twofold.errors import ConfigurationError, require
from twofold.events import Recorder
from twofold.torture.config import TortureConfig
from twofold.torture.faults import InjectedFault, inject
from twofold.torture.measures import UNMEASURED, Capacity, CapacityProbe
from twofold.torture.metrics import read_metrics
from twofold.torture.prompts import TorturePrompt, torture_prompts
from twofold.torture.streams import RETRY, Ending, TortureClient, TortureStream, draw_behaviour

OnStage = Callable[[str], None]
_NO_LIMIT_S: Final = 1e9  # of a request: streams that hang are cancelled
_ALONE_S: Final = 600.0  # limit of the wait for a token of a reference answer
_PAUSE_S: Final = 0.5  # after a failure, so that clients of a dead service do not spin


@dataclass(slots=True)
class TortureRun:
    """A fault suite: its clients, its faults, and the capacity of the service before and after the load.

    `alone` has the reproducible reference answers by the number of their prompt. Times are of time.monotonic().
    """

    config: TortureConfig
    client: TortureClient
    prompts: Sequence[TorturePrompt]
    alone: dict[int, TortureStream]
    on_stage: OnStage
    streams: list[TortureStream] = field(default_factory=list)  # ended
    faults: list[InjectedFault] = field(default_factory=list)
    before: Capacity = UNMEASURED
    after: Capacity = UNMEASURED
    started_s: float = 0.0  # of the load
    ended_s: float = 0.0
    interrupted: bool = False

    async def run(self) -> None:
        """Load the service, and measure its capacity before and after. Ctrl-C ends the load early."""
        probe = CapacityProbe(self.config, self.client, self.prompts, self.streams)
        self.on_stage("capacity before the load")
        self.before = await probe.measure()
        self.started_s = time.monotonic()
        over_s, loop = self.started_s + self.config.duration_s, asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            injecting = tasks.create_task(self._inject())
            loop.add_signal_handler(signal.SIGINT, self._interrupt, loop, injecting)
            for number in range(self.config.concurrency):
                draw = np.random.default_rng((self.config.prompts.seed, number))
                tasks.create_task(self._send(draw, lambda: injecting.done() and time.monotonic() >= over_s))
        loop.remove_signal_handler(signal.SIGINT)
        self.ended_s = time.monotonic()
        self.on_stage("capacity after the load")
        self.after = await probe.measure(self.before)

    def _interrupt(self, loop: asyncio.AbstractEventLoop, injecting: asyncio.Task[None]) -> None:
        self.interrupted = True
        injecting.cancel()
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the command

    async def _inject(self) -> None:
        """Run the commands in turn. A late command does not drop the later ones."""
        kills, every_s = self.config.kills, self.config.every_s
        number = 1
        while kills and number * every_s < self.config.duration_s:
            await asyncio.sleep(self.started_s + number * every_s - time.monotonic())
            self.faults.append(await inject(kills[(number - 1) % len(kills)], self.config.hang_s))
            number += 1

    async def _send(self, draw: np.random.Generator, is_over: Callable[[], bool]) -> None:
        """Be one client after another."""
        while not (self.interrupted or is_over()):
            prompt = self.prompts[int(draw.integers(len(self.prompts)))]
            stream = await self.client.stream(prompt, draw_behaviour(draw, self.alone[prompt.number]))
            self.streams.append(stream)
            if stream.behaviour.retries and stream.ending is Ending.LEFT:
                stream = await self.client.stream(prompt, RETRY)
                self.streams.append(stream)
            self.on_stage(f"load: {len(self.streams)} streams, {len(self.faults)} faults")
            if stream.ending in (Ending.BROKEN, Ending.REFUSED):
                await asyncio.sleep(_PAUSE_S)


async def run_torture(config: TortureConfig, on_stage: OnStage = lambda _: None) -> TortureRun:
    """Run a fault suite.

    Raises ConfigurationError if the reference fails on a prompt or answers none alike twice, and if `metrics` has a
    server without metrics.
    """
    if config.metrics:
        await read_metrics(config.metrics, config.api_key, required=True)
    longest = min(config.max_prompt_tokens, (config.endpoint.max_model_len or sys.maxsize) - config.max_tokens)
    prompts = torture_prompts(config.prompts, config.num_prompts, longest, config.max_tokens)
    alone = await _learn(config, prompts, on_stage)
    prompts = [prompt for prompt in prompts if prompt.number in alone]
    async with _client(config, config.endpoint) as client:
        sender = TortureClient(client, config.prompts.seed, config.hang_s)
        run = TortureRun(config, sender, prompts, alone, on_stage)
        await run.run()
    return run


def _client(config: TortureConfig, endpoint: Endpoint) -> Client:
    limits = ClientConfig(timeout_s=_NO_LIMIT_S, ignore_eos=config.ignore_eos)
    return Client(endpoint, Recorder(), limits, config.api_key)


async def _learn(
    config: TortureConfig, prompts: Sequence[TorturePrompt], on_stage: OnStage
) -> dict[int, TortureStream]:
    """Return the answers to the prompts, each sent alone twice, without answers that differ."""
    alone, url = dict[int, TortureStream](), config.reference.base_url
    async with _client(config, config.reference) as client:
        sender = TortureClient(client, config.prompts.seed, _ALONE_S)
        for number, prompt in enumerate(prompts):
            on_stage(f"reference answers: {number} of {len(prompts)} prompts")
            first, second = await sender.stream(prompt), await sender.stream(prompt)
            for answer in (first, second):
                if answer.ending is not Ending.COMPLETE:
                    tokens = prompt.request.prompt_tokens
                    raise ConfigurationError(f"{url} fails on a prompt of {tokens} tokens alone: {answer.detail}")
            if first.output == second.output:
                alone[prompt.number] = first
    require(bool(alone), f"{url} answers no prompt alike twice, alone and greedily: give another --reference")
    return alone
