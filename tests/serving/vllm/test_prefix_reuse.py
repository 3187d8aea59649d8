"""The router sends prompts to the vLLM worker that has their prefix cached."""

import asyncio
import random

import aiohttp
import pytest

from support.api_client import complete, complete_cached
from support.vllm_alone import greedy_by_vllm

FLAGS = ("--prefill", "2", "--decode", "1", "--transport", "nixl", "--router", "local-prefix")
BLOCK, OUTPUT = 32, 8


async def twice(url, prompts):
    """Send all prompts twice; return the results of each round."""
    async with aiohttp.ClientSession() as session:
        how = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        first = [await complete(session, url, prompt, **how) for prompt in prompts]
        return first, [await complete_cached(session, url, prompt, **how) for prompt in prompts]


@pytest.mark.covers(engine="vllm", model="llama", feature="prefix")
def test_routes_prompts_to_their_cached_prefix(vllm_service, vllm_model_dir):
    """When all prompts are sent a second time, the full blocks of every prompt are cached, and the outputs
    are the same as the first time.
    """
    draw = random.Random(8)
    prompts = [[draw.randint(10, 500) for _ in range(draw.randint(200, 600))] for _ in range(8)]
    first, again = asyncio.run(twice(vllm_service("llama", *FLAGS), prompts))
    assert first == greedy_by_vllm(vllm_model_dir("llama"), prompts, OUTPUT)
    assert [tokens for tokens, _ in again] == first
    for prompt, (_, cached) in zip(prompts, again, strict=True):
        assert cached >= (len(prompt) - 1) // BLOCK * BLOCK
