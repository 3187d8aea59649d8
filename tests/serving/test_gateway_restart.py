"""The gateway is stopped or killed under load and restarted."""

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest

from support.api_client import all_blocks_free, complete, served_name
from support.chaos import HANG_S
from support.flags import ENGINE, SPLIT
from support.held import family, run_dirs, segments
from support.running_service import running_service
from twofold.bench.services import free_port

STREAMS = 6
# About 50 ms a token: an answer of thousands of tokens takes minutes.
SLOW = """
model: bloom-176b
router: jsq
pools:
  - {machines: 1, machine: dgx-h100, role: prefill}
  - {machines: 1, machine: dgx-h100, role: decode}
"""
ASK = {"prompt": [5, 6, 7] * 30, "temperature": 1.0, "seed": 6, "ignore_eos": True}


class Client:
    """Client of one stream, which records the tokens and how the stream ends."""

    def __init__(self, session, url, name, max_tokens):
        self.session, self.url = session, url
        self.body = {"model": name, **ASK, "max_tokens": max_tokens, "stream": True, "return_token_ids": True}
        self.tokens = []
        self.began = asyncio.Event()

    async def read(self):
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=self.body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.strip() == b"data: [DONE]":
                        return "whole"
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return "error"
                        self.tokens += event["choices"][0]["token_ids"]
                        self.began.set()
        except (aiohttp.ClientError, ConnectionError):
            pass
        return "broken"


async def end_under_load(process, url, number, max_tokens):
    """Send a signal to the gateway while streams run; return how each stream ended, and its tokens."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        name = await served_name(session, url)
        clients = [Client(session, url, name, max_tokens) for _ in range(STREAMS)]
        reading = [asyncio.create_task(client.read()) for client in clients]
        while not all(client.began.is_set() for client in clients):
            assert not any(task.done() for task in reading), "a stream ended before the gateway did"
            await asyncio.sleep(0.01)
        process.send_signal(number)
        ends = await asyncio.wait_for(asyncio.gather(*reading), HANG_S)  # raises TimeoutError for a stream that hangs
        return ends, [client.tokens for client in clients]


async def answer(url, max_tokens):
    async with aiohttp.ClientSession() as session:
        return await complete(session, url, **ASK, max_tokens=max_tokens)


def left_behind(processes, named):
    """Return the processes and the shared memory files that remain after the service has ended."""
    _, alive = psutil.wait_procs(processes, timeout=600)
    return alive, [path for path in named if Path(path).exists()]


def named_things(process):
    return run_dirs(process) + [path for path, _ in segments(process) if path.startswith("/dev/shm/")]


@pytest.mark.parametrize(
    ("number", "max_tokens", "end"),
    [(signal.SIGKILL, 1900, "broken"), (signal.SIGTERM, 200, "whole")],
    ids=["killed", "told to end"],
)
def test_streams_end_and_a_new_gateway_answers_the_same(number, max_tokens, end, tiny_model_dir):
    model, port = tiny_model_dir("llama"), free_port()
    with running_service(model, *ENGINE, *SPLIT, port=port) as (process, url):
        whole = asyncio.run(answer(url, max_tokens))
        processes, named = family(process), named_things(process)
        assert len(named) == 1, "the socket directory remains"
        ends, got = asyncio.run(end_under_load(process, url, number, max_tokens))
        assert set(ends) == {end}
        assert all(tokens == (whole if end == "whole" else whole[: len(tokens)]) for tokens in got)
        assert process.wait(timeout=600) == (-number if number == signal.SIGKILL else 0)
        with running_service(model, *ENGINE, *SPLIT, port=port) as (_, again):
            assert asyncio.run(answer(again, max_tokens)) == whole
            assert asyncio.run(all_blocks_free(again))
        assert left_behind(processes, named) == ([], [])


def test_answers_beyond_the_grace_period_are_cut_off(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(SLOW)
    with running_service(None, "--engine", "emulated", "--cluster", str(file)) as (process, url):
        processes, named = family(process), named_things(process)
        ends, got = asyncio.run(end_under_load(process, url, signal.SIGTERM, 1900))
        assert set(ends) == {"error"}, "streams end with an error"
        longest = max(got, key=len)
        assert all(tokens == longest[: len(tokens)] for tokens in got)
        assert process.wait(timeout=600) == 0
        assert left_behind(processes, named) == ([], [])
