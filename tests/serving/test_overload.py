"""`twofold serve --overload` end to end on emulated machines."""

import asyncio
import json

import aiohttp
import pytest

from support.api_client import all_blocks_free, metric, served_name
from twofold.bench.services import served

# Slow machines: 2,000 prompt tokens take most of a second.
CLUSTER = """
model: llama2-70b
performance: fitted
router: jsq
handoff: layer-wise
pools:
  - {machines: 1, machine: dgx-a100, tensor_parallel: 2, instances: 1, role: prefill}
  - {machines: 1, machine: dgx-a100, tensor_parallel: 2, instances: 1, role: decode}
"""
PROMPT = [7] * 2000
EVERYBODY = 16


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Return a function that starts a service with the given overload rule, SLO and further cluster settings."""
    folder = tmp_path_factory.mktemp("clusters")

    def start(rule, slo, more=""):
        path = folder / f"{rule}.yaml"
        path.write_text(CLUSTER + more)
        return served(None, ("--engine", "emulated", "--cluster", str(path), "--overload", rule, "--slo", slo))

    return start


async def ask(session, url, name, **fields):
    """Send a completion request and return the status, headers and body of the response."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 2, **fields}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return response.status, response.headers, await response.json()


async def all_at_once(url, count, **fields):
    async with aiohttp.ClientSession() as session:
        name = await served_name(session, url)
        return await asyncio.gather(*(ask(session, url, name, **fields) for _ in range(count)))


@pytest.mark.covers(engine="emulated", feature="overload")
def test_rejects_requests_that_would_miss_the_ttft_bound(service):
    with service("predicted", "ttft=3,tpot=1") as url:
        answers = asyncio.run(all_at_once(url, EVERYBODY))
        refused = [(headers, body) for status, headers, body in answers if status == 429]
        taken = [body for status, _, body in answers if status == 200]
        assert len(refused) + len(taken) == EVERYBODY
        assert 0 < len(taken) < EVERYBODY
        for headers, body in refused:
            assert int(headers["Retry-After"]) >= 1
            assert body["error"]["code"] == "prefill_load"
        assert metric(url, "admission_rejections_total") == len(refused)
        assert metric(url, "ttft_prediction_error_ratio_count") == len(taken)
        assert asyncio.run(all_blocks_free(url))
        (status, _, _), *_ = asyncio.run(all_at_once(url, 1))
        assert status == 200


def test_a_prompt_beyond_the_slo_is_a_400(service):
    with service("early", "ttft=0.1,tpot=1") as url:
        ((status, headers, body),) = asyncio.run(all_at_once(url, 1))
        assert (status, body["error"]["code"]) == (400, "beyond_slo")
        assert "Retry-After" not in headers


def test_the_baseline_rejects_after_prefill_with_a_429(service):
    """A request that is rejected after prefill gets a 429, even if it asked for a stream."""

    async def beside_another(url):
        async with aiohttp.ClientSession() as session:
            name = await served_name(session, url)
            long = {"model": name, "prompt": [7] * 20, "max_tokens": 2000, "stream": True}
            async with session.post(f"{url}/v1/completions", json=long) as running:
                await running.content.readline()  # wait for its first token
                streamed = await ask(session, url, name, prompt=[7] * 20, stream=True)
                whole = await ask(session, url, name, prompt=[7] * 20)
            return streamed, whole

    # Two sequences take turns, in twice 56 ms: measured iterations may be a good deal shorter on a busy host.
    with service("baseline", "ttft=30,tpot=0.07", "max_num_seqs: 1\n") as url:
        for status, headers, body in asyncio.run(beside_another(url)):
            assert (status, body["error"]["code"]) == (429, "decode_load"), json.dumps(body)
            assert int(headers["Retry-After"]) >= 1
        assert asyncio.run(all_blocks_free(url))
