"""An emulated service of four instances: real processes, sockets, leases and hand-offs without a model."""

import asyncio
from pathlib import Path

import aiohttp
import psutil
import pytest

from support.api_client import all_blocks_free, block_counts, complete, complete_all
from twofold.bench.services import metrics, served

# A small, fast model, so that hand-offs and decodes overlap within seconds.
CLUSTER = """
model: opt-1.3b
router: jsq
handoff: {handoff}
performance: roofline
pools:
  - {{machines: 2, machine: dgx-a100, tensor_parallel: 8, role: prefill}}
  - {{machines: 2, machine: dgx-a100, tensor_parallel: 8, role: decode}}
"""
PROMPTS = [[7] * (10 + 40 * i) for i in range(12)]


@pytest.fixture(scope="module", params=["layer-wise", "by-size"])
def url(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER.format(handoff=request.param))
    with served(None, ["--engine", "emulated", "--cluster", str(path)]) as running:
        yield running


def ask(url, prompts, **fields):
    work = complete_all(url, prompts, at_once=12, max_tokens=24, **fields)
    return asyncio.run(asyncio.wait_for(work, 300))


def metric(url, name):
    return next(float(line.split()[-1]) for line in metrics(url).splitlines() if line.startswith(name))


@pytest.mark.covers(engine="emulated", feature="handoff")
def test_requests_are_served_and_all_blocks_are_freed(url):
    before = metric(url, "twofold:kv_transfer_bytes_total")
    outputs = ask(url, PROMPTS, seed=3)
    assert [len(output) for output in outputs] == [24] * 12
    assert asyncio.run(all_blocks_free(url))
    assert sorted(block_counts(url)) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    moved = metric(url, "twofold:kv_transfer_bytes_total") - before
    blocks = sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    assert moved == blocks * 16 * 196_608  # bytes of KV per token of opt-1.3b


def test_tokens_do_not_depend_on_worker_or_load(url):
    together = ask(url, [PROMPTS[3]] * 6, seed=11)
    alone = ask(url, [PROMPTS[3]], seed=11)
    assert all(output == alone[0] for output in together)
    assert ask(url, [PROMPTS[3]], seed=12) != alone


@pytest.mark.covers(engine="emulated", feature="disconnects")
def test_disconnects_free_every_block(url):

    async def hang_up():
        async with aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(complete(session, url, [5] * 900, max_tokens=900)) for _ in range(8)]
            for task in tasks:
                await asyncio.sleep(0.05)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return await all_blocks_free(url)

    assert asyncio.run(asyncio.wait_for(hang_up(), 300))


def test_rejects_text_without_a_tokenizer(url):

    async def say():
        async with aiohttp.ClientSession() as session:
            body = {"model": "opt-1.3b", "prompt": "Once upon a time"}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                return response.status, await response.json()

    status, answer = asyncio.run(say())
    assert status == 400
    assert "tokenizer" in answer["error"]["message"]


def test_no_process_imports_torch(url):
    ours = (each for each in psutil.Process().children() if "emulated" in each.cmdline())
    processes = [each for gateway in ours for each in (gateway, *gateway.children(recursive=True))]
    assert len(processes) == 6
    assert not any("libtorch" in Path(f"/proc/{each.pid}/maps").read_text() for each in processes)
