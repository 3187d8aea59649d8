"""A service on a Ray cluster, and clients that check all responses."""

import asyncio
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import aiohttp
import psutil

from support.api_client import all_blocks_free, complete, served_name
from support.flags import COLOCATED, ENGINE
from support.waiting import until
from twofold.bench.services import free_port, served, stop, wait_ready
from twofold.cli import pools as pools_run

QUESTIONS = [
    {"prompt": [5 + i, 6, 7] * (25 * i + 5), "max_tokens": 150, "temperature": 0, "ignore_eos": True} for i in range(5)
]
CLIENTS = 3


class RayService:
    """A `twofold serve --launcher ray` process; `output` is its log."""

    def __init__(self, model, address, folder, flags):
        self.log = folder / "serve.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "twofold.cli.main", "serve", str(model), *ENGINE, *flags]
        command += ["--launcher", "ray", "--ray-address", address, "--port", str(port)]
        with self.log.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)

    @property
    def output(self):
        return self.log.read_text()

    def nodes(self):
        """Return the node of each worker."""
        return dict(re.findall(r"(\w+-\d) is on node (\w+)", re.sub(r"\s+", " ", self.output)))

    def states(self):
        """Return the role and state of each worker."""
        return {each.instance: (each.role.value, each.state) for each in pools_run.ask(self.url, None).pools}

    def up(self):
        return sorted(name for name, (_, state) in self.states().items() if state == "up")

    def roles_up(self):
        return sorted(role for role, state in self.states().values() if state == "up")


@contextmanager
def ray_service(model, address, folder, *flags):
    service = RayService(model, address, folder, flags)
    try:
        assert wait_ready(service.process, service.url), (service.process.poll(), service.output)
        yield service
    finally:
        stop(service.process)


class Load:
    """Clients that send prompts until `over` is set, and check the outputs."""

    def __init__(self, url, answers):
        self._url, self._answers = url, answers
        self.over = False
        self.answered, self.wrong = 0, []

    async def run(self):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            name = await served_name(session, self._url)
            await asyncio.gather(*(self._client(session, name, each) for each in range(CLIENTS)))

    async def _client(self, session, name, number):
        while not self.over:
            number = (number + 1) % len(QUESTIONS)
            tokens = await _stream(session, self._url, {"model": name, **QUESTIONS[number]})
            self.answered += 1
            if tokens != self._answers[number]:
                self.wrong.append((number, tokens))


async def _stream(session, url, body):
    tokens = []
    body = {**body, "stream": True, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.strip() == b"data: [DONE]":
                return tokens
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
    raise AssertionError(f"the stream broke off after {len(tokens)} tokens")


def answers_of(model):
    """Return the outputs for the test prompts from local workers that run both prefill and decode."""

    async def ask(url):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            return [await complete(session, url, **question) for question in QUESTIONS]

    with served(model, (*ENGINE, *COLOCATED)) as url:
        return asyncio.run(ask(url))


def under_load(service, answers, what):
    """Call the function `what` while clients stream completions, and check that all outputs equal the
    expected outputs `answers`.
    """
    load = Load(service.url, answers)
    with ThreadPoolExecutor(1) as pool:  # Ray's test cluster needs the main thread
        clients = pool.submit(asyncio.run, load.run())

        def more():
            enough = load.answered + CLIENTS
            until(lambda: clients.done() or load.answered >= enough)

        try:
            more()
            what()
            more()
        finally:
            load.over = True
        clients.result()
    assert load.wrong == []
    assert asyncio.run(all_blocks_free(service.url))


def processes_of(worker):
    """Return the processes of a worker on all nodes."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            ancestors = one.parents() if one.name() == worker else ()
            if any("twofold.serving.launch.ray.host" in each.cmdline() for each in ancestors):
                found.append(one)
    return found
