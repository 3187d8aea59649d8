"""KV hand-offs with an expired lease or a broken connection."""

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager

import aiohttp
import pytest

from support import serve_with_lease
from support.api_client import all_blocks_free, complete, metric
from support.chaos import DEADLINE_S, HANG_S
from support.cut import cut_between
from support.flags import ENGINE, SPLIT
from support.held import holdings, leaks
from support.running_service import children, named, running_service
from support.transports import NIXL

ROUNDS = int(os.environ.get("TWOFOLD_CHAOS_ROUNDS", "4"))
LEASE_S, PAUSE_S = "0.4", 0.9  # shorter than the heartbeat timeout, so the worker is not replaced
ASK = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True, "timeout": DEADLINE_S}
ARRIVING = 'num_requests{instance="decode-0",state="arriving"}'


class Load:
    """Clients that keep hand-offs in flight by sending long prompts."""

    def __init__(self, url):
        draw = random.Random(4)
        self.url = url
        self.prompts = [[draw.randint(10, 500) for _ in range(draw.randint(600, 1500))] for _ in range(12)]
        self.answers, self.wrong, self.answered = [], [], 0

    async def learn(self):
        async with aiohttp.ClientSession() as session:
            self.answers = [await complete(session, self.url, prompt, **ASK) for prompt in self.prompts]

    @asynccontextmanager
    async def running(self):
        """Run the clients while the context is open; raise TimeoutError if a request hangs."""
        over = asyncio.Event()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            for number in range(len(self.prompts)):
                tasks.create_task(self._ask(session, number, over))
            yield
            over.set()

    async def _ask(self, session, number, over):
        while not over.is_set():
            asking = complete(session, self.url, self.prompts[number], **ASK)
            answer = await asyncio.wait_for(asking, HANG_S)
            self.answered += 1
            if answer != self.answers[number]:
                self.wrong.append((number, answer, self.answers[number]))

    async def something_arrives(self):
        while not await asyncio.to_thread(metric, self.url, ARRIVING):  # noqa: ASYNC110 (another process knows)
            await asyncio.sleep(0.005)

    async def more_answers(self):
        """Wait for n/2 more responses, where n is the number of clients."""
        enough = self.answered + len(self.prompts) // 2
        while self.answered < enough:  # noqa: ASYNC110 (what it waits for is many tasks)
            await asyncio.sleep(0.02)


def worker(process, name):
    return named(process, name)[0]


def test_requests_are_replayed_when_a_source_outsleeps_its_lease(tiny_model_dir):
    """If a hand-off's lease expires while the prefill worker is suspended, the request's output is unchanged."""
    model = tiny_model_dir("llama")
    with running_service(model, *ENGINE, *SPLIT, program=(serve_with_lease.__file__, LEASE_S)) as (process, url):
        load = Load(url)
        asyncio.run(load.learn())

        async def run():
            async with load.running():
                for _ in range(ROUNDS):
                    await load.something_arrives()
                    source = worker(process, "prefill-0")
                    source.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(PAUSE_S)
                    source.send_signal(signal.SIGCONT)
                    await load.more_answers()

        asyncio.run(asyncio.wait_for(run(), 300 + 60 * ROUNDS))
        print(f"{load.answered} answers, {metric(url, 'request_replays_total'):.0f} attempts lost")
        assert load.wrong == []
        assert metric(url, "request_replays_total") > 0, "leases must expire"
        assert asyncio.run(all_blocks_free(url))


@NIXL
@pytest.mark.parametrize("handoff", ["layer-wise", "pull"])
def test_requests_are_replayed_after_a_broken_transfer(handoff, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")  # shared memory cannot be cut on one host
    flags = (*SPLIT, "--transport", "nixl", "--handoff", handoff, "--kv-checksums")
    with running_service(tiny_model_dir("llama"), *ENGINE, *flags) as (process, url):
        load, cuts = Load(url), []

        async def run():
            async with load.running():
                for _ in range(ROUNDS):
                    await load.something_arrives()
                    # Connections of the last cut may not be restored yet.
                    while not (cut := cut_between(children(process))):  # noqa: ASYNC110 (only the kernel knows)
                        await asyncio.sleep(0.005)
                    cuts.append(cut)
                    await load.more_answers()

        asyncio.run(load.learn())
        before = holdings(process)
        asyncio.run(asyncio.wait_for(run(), 300 + 60 * ROUNDS))
        print(f"{load.answered} answers, cuts {cuts}, {metric(url, 'request_replays_total'):.0f} attempts lost")
        assert all(cuts), "each cut must hit a connection"
        assert load.wrong == []
        assert asyncio.run(all_blocks_free(url))
        assert leaks(process, before) == {}, "(before, after)"
