"""`twofold serve --inline-tbt`: a colocated worker adds prompts to decode batches within a TBT bound."""

import asyncio
import json
import random

import aiohttp
from msgspec.structs import replace

from support.api_client import all_blocks_free, served_name
from support.flags import ENGINE
from support.hosts import profile
from support.reference import greedy_outputs
from support.running_service import running_service
from twofold.hardware.hf_config import read_model
from twofold.performance.profile import dump_profile

LONG_OUTPUT, OUTPUT = 400, 4


def prompt(seed, count):
    draw = random.Random(seed)
    return [draw.randint(10, 500) for _ in range(count)]


async def stream(session, url, name, ids, output, events, began):
    """Stream a completion, log the arrival of each token in `events`, and return the tokens."""
    body = {
        "model": await served_name(session, url),
        "prompt": ids,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    made = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                made += choice["token_ids"]
                events.append((name, len(made)))
                began.set()
    return made


async def beside_a_decode(url, decode, short, long):
    """Start a short and a long prompt during a long decode; return all outputs, and the arrival order of the tokens."""
    events, tasks = [], []
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for name, ids, output in (("decode", decode, LONG_OUTPUT), ("short", short, OUTPUT), ("long", long, OUTPUT)):
            began = asyncio.Event()
            tasks.append(group.create_task(stream(session, url, name, ids, output, events, began)))
            await began.wait()
    return [task.result() for task in tasks], events


def test_a_short_prompt_joins_decodes_and_a_long_one_waits(tiny_model_dir, tmp_path):
    # The TBT bound is 100 ms; an iteration takes 51 ms with the short prompt and 211 ms with the long one.
    model, path = tiny_model_dir("llama"), tmp_path / "host.yaml"
    path.write_text(dump_profile(replace(profile(), model=read_model(model))))
    prompts = prompt("decode", 30), prompt("short", 40), prompt("long", 200)
    flags = (*ENGINE, "--colocated", "1", "--inline-tbt", "0.1", "--profile", str(path))
    with running_service(model, *flags) as (_, url):
        outputs, events = asyncio.run(beside_a_decode(url, *prompts))
        assert asyncio.run(all_blocks_free(url))
    last = events.index(("decode", LONG_OUTPUT))
    assert events.index(("short", OUTPUT)) < last
    assert events.index(("long", 1)) > last
    lengths = LONG_OUTPUT, OUTPUT, OUTPUT
    for ids, made, length in zip(prompts, outputs, lengths, strict=True):
        assert made == greedy_outputs(model, [ids], length)[0]
