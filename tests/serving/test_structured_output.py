"""Constrained outputs of a live service: valid, and the same split, colocated and sharded."""

import asyncio
import random

import aiohttp
import pytest

from support.api_client import all_blocks_free, served_name
from support.flags import COLOCATED, SPLIT
from support.structured import CONSTRAINTS, FIELDS, matches

WAYS = {
    "split": SPLIT,
    "serialized": (*SPLIT, "--handoff", "serialized"),
    "colocated": COLOCATED,
    "sharded": ("--prefill", "1", "--decode", "1", "--tp", "2"),
}
PROMPTS = 8


async def answers(url, fields, *, temperature):
    """Return text and finish reason of several prompts sent at once, with the constraint in `fields`."""
    draw = random.Random(5)
    prompts = [[draw.randint(10, 500) for _ in range(draw.randint(1, 300))] for _ in range(PROMPTS)]
    async with aiohttp.ClientSession() as session:
        name = await served_name(session, url)

        async def one(number, prompt):
            body = {"model": name, "prompt": prompt, "max_tokens": 300, "temperature": temperature, "seed": number}
            async with session.post(f"{url}/v1/completions", json={**body, **fields}) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]

        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def check(urls, kind):
    """Check that all services give the same answers to constrained requests, and that complete ones are valid."""
    for temperature in (0.0, 1.0):
        made = [asyncio.run(answers(url, FIELDS[kind], temperature=temperature)) for url in urls]
        assert all(each == made[0] for each in made)
        complete = [text for text, reason in made[0] if reason == "stop"]
        assert all(matches(CONSTRAINTS[kind], text) for text in complete)
        assert len(complete) >= PROMPTS // 2


@pytest.mark.parametrize("kind", FIELDS)
def test_constrained_outputs_do_not_depend_on_the_split(kind, service):
    urls = [service("llama", flags) for flags in WAYS.values()]
    check(urls, kind)
    assert asyncio.run(all_blocks_free(urls[0]))


def test_chat_answers_with_json(service):
    url = service("llama", SPLIT)

    async def ask():
        async with aiohttp.ClientSession() as session:
            body = {
                "model": await served_name(session, url),
                "messages": [{"role": "user", "content": "Who are you?"}],
                "max_tokens": 300,
                **FIELDS["json"],
                "seed": 1,
            }
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]

    choice = asyncio.run(ask())
    assert choice["finish_reason"] == "stop"
    assert matches(CONSTRAINTS["json"], choice["message"]["content"])
