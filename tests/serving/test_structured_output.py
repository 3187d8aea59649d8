"""Constrained outputs of a live service: valid, and the same split, colocated and sharded."""

import asyncio
import random
from typing import Annotated, Literal

import aiohttp
import openai
import pydantic
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
    """Check that all services give the same answers to constrained requests, and that complete ones are valid.

    A service may end when the next URL is taken.
    """
    first = None
    for url in urls:
        made = [asyncio.run(answers(url, FIELDS[kind], temperature=temperature)) for temperature in (0.0, 1.0)]
        first = first or made
        assert made == first
        assert asyncio.run(all_blocks_free(url))
    complete = [text for each in first for text, reason in each if reason == "stop"]
    assert all(matches(CONSTRAINTS[kind], text) for text in complete)
    assert len(complete) >= PROMPTS // 2  # a random model may write white space until the limit


@pytest.mark.covers(engine="torch", model="llama", feature="structured")
@pytest.mark.parametrize("kind", FIELDS)
def test_constrained_outputs_do_not_depend_on_the_split(kind, service):
    check((service("llama", flags) for flags in WAYS.values()), kind)


class Colour(pydantic.BaseModel):
    name: Literal["red", "green"]


class Flag(pydantic.BaseModel):
    colours: Annotated[list[Colour], pydantic.Field(max_length=3)]
    stripes: Annotated[int, pydantic.Field(ge=0, le=20)]
    old: bool


def test_openais_client_parses_answers(service):
    """A class of pydantic becomes a strict JSON schema, with references, and the answer an object of the class."""
    with openai.OpenAI(base_url=f"{service('llama', SPLIT)}/v1", api_key="none", timeout=600) as client:
        (card,) = client.models.list().data
        answer = client.chat.completions.parse(
            model=card.id,
            messages=[{"role": "user", "content": "Draw a flag."}],
            response_format=Flag,
            max_tokens=400,
            seed=1,
        )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Flag)
