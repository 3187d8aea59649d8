"""LoRA adapters of vLLM workers: outputs equal those of one vLLM with the adapter, and share no cached blocks."""

import asyncio
import json
import random
import signal

import aiohttp
import pytest

from serving.vllm.conftest import ENGINE
from support.api_client import all_blocks_free, complete, complete_all, complete_cached
from support.lora import write_adapter
from support.running_service import named, running_service
from support.vllm_alone import greedy_by_vllm
from twofold.bench.services import served
from twofold.errors import ConfigurationError

SPLIT = ("--prefill", "1", "--decode", "1", "--router", "local-prefix")
BLOCK, OUTPUT, LONG = 32, 12, 150
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(vllm_model_dir, tmp_path_factory):
    """Return the directories of two LoRA adapters by name."""
    home = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(vllm_model_dir("llama"), home / name, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def service(vllm_model_dir, adapters):
    """Yield the process and the URL of a service with two adapters."""
    given = [part for name, path in adapters.items() for part in ("--lora-modules", f"{name}={path}")]
    flags = (*ENGINE, *SPLIT, *given, "--served-model-name", "base")
    with running_service(vllm_model_dir("llama"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(5)
    return [[draw.randint(10, 500) for _ in range(length)] for length in (1, 31, 32, 33, 64, 200, 700, 1500)]


def test_models_list_the_adapters(service, adapters, vllm_model_dir):
    async def models():
        async with aiohttp.ClientSession() as session, session.get(f"{service[1]}/v1/models") as answer:
            return {each["id"]: (each["root"], each["parent"]) for each in (await answer.json())["data"]}

    paths = {name: (str(path), "base") for name, path in adapters.items()}
    assert asyncio.run(models()) == {"base": (str(vllm_model_dir("llama")), None)} | paths


@pytest.mark.covers(engine="vllm", model="llama", feature="lora")
def test_outputs_equal_those_of_one_vllm(service, adapters, prompts, vllm_model_dir):
    """Requests for the model and both adapters, which run beside each other, get the tokens of plain vLLM."""

    async def everything():
        asked = [complete_all(service[1], prompts, at_once=8, model=name, **how) for name in ("base", "a", "b")]
        return await asyncio.gather(*asked)

    how = {"max_tokens": OUTPUT, **GREEDY}
    alone = [greedy_by_vllm(vllm_model_dir("llama"), prompts, OUTPUT, adapter=adapters.get(each)) for each in "-ab"]
    assert asyncio.run(everything()) == alone
    different = [len({json.dumps(each) for each in outputs}) for outputs in zip(*alone, strict=True)]
    assert different.count(3) > len(prompts) // 2, "the adapters must matter"
    assert asyncio.run(all_blocks_free(service[1]))


def test_adapters_and_cache_salts_share_no_cached_blocks(service):
    """A prompt is found in the cache only for the same adapter and cache salt."""
    draw = random.Random(6)
    prompt = [draw.randint(10, 500) for _ in range(10 * BLOCK + 1)]
    asked = [("base", ""), ("a", ""), ("b", ""), ("base", "x"), ("a", "x"), ("a", "y")]

    async def cached():
        async with aiohttp.ClientSession() as session:
            how = {"max_tokens": 4, **GREEDY}
            return [
                (await complete_cached(session, service[1], prompt, model=name, cache_salt=salt or None, **how))[1]
                for name, salt in asked + asked
            ]

    assert asyncio.run(cached()) == [0] * len(asked) + [10 * BLOCK] * len(asked)


def test_unknown_models_are_refused(service):
    async def ask():
        async with aiohttp.ClientSession() as session:
            with pytest.raises(AssertionError, match="'c' is not served here"):
                await complete(session, service[1], [1, 2, 3], model="c")

    asyncio.run(ask())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_replays_keep_the_adapter(role, service, adapters, vllm_model_dir):
    """A stream whose worker is killed continues with its adapter."""
    process, url = service
    prompt = [[7, 8, 9] * 100]
    (expected,) = greedy_by_vllm(vllm_model_dir("llama"), prompt, LONG, adapter=adapters["a"])

    async def stream():
        tokens = []
        body = {"model": "a", "prompt": prompt[0], "max_tokens": LONG, "stream": True, "return_token_ids": True}
        timeout = aiohttp.ClientTimeout(total=600)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json={**body, **GREEDY}) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    before, tokens = tokens, tokens + event["choices"][0]["token_ids"]
                    if not before and tokens:
                        (worker,) = named(process, f"{role}.*")
                        worker.send_signal(signal.SIGKILL)
        return tokens

    assert asyncio.run(stream()) == expected


def test_an_adapter_that_vllm_cannot_load(adapters, vllm_model_dir, tmp_path):
    """The service ends with vLLM's reason if an adapter's rank is above the limit."""
    path = write_adapter(vllm_model_dir("llama"), tmp_path / "wide", seed=3, rank=32)
    flags = (*ENGINE, "--colocated", "1", "--lora-modules", f"wide={path}")
    refused = pytest.raises(ConfigurationError, match="LoRA rank 32 is greater than max_lora_rank 16")
    with refused, served(vllm_model_dir("llama"), flags):
        pass
