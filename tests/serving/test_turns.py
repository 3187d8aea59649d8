"""A turn of a conversation computes only its new tokens: the KV of earlier answers is cached too."""

import asyncio

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete_cached, metric
from support.flags import ENGINE, SPLIT
from support.reference import greedy_outputs
from support.running_service import running_service
from support.stored_prompts import BLOCK, BLOCK_BYTES, kill, moved, tokens
from support.waiting import until

STORE = ("--kv-store-dram", "16MiB", "--kv-checksums")
ANSWER = 40
GREEDY = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
SAMPLED = {"max_tokens": ANSWER, "temperature": 0.8, "seed": 3, "ignore_eos": True, "repetition_penalty": 1.2}


async def ask(url, prompt, **fields):
    """Send a completion request; return its output tokens and its number of cached prompt tokens."""
    async with aiohttp.ClientSession() as session:
        return await complete_cached(session, url, prompt, **fields)


def reusable(tokens_before):
    """Return how many tokens of the next turn are in full blocks. The last token of an answer has no KV."""
    return (tokens_before - 1) // BLOCK * BLOCK


def converse(url, name, turns, stored, **fields):
    """Run a conversation; return the prompts, the answers and the cached tokens of its turns."""
    prompts, answers, cached = [], [], []
    history = []
    for turn in range(turns):
        prompt = history + tokens(f"{name} {turn}", 21 + turn)
        answer, found = asyncio.run(ask(url, prompt, **fields))
        prompts.append(prompt)
        answers.append(answer)
        cached.append(found)
        history = prompt + answer
        stored(reusable(len(history)) // BLOCK)
    return prompts, answers, cached


@pytest.mark.parametrize(
    "flags",
    [
        ("--colocated", "1"),
        ("--colocated", "1", "--max-num-batched-tokens", "16"),
        ("--colocated", "1", "--tp", "2"),
        ("--router", "splitwise", "--prefill", "1", "--decode", "1"),
        (*SPLIT, *STORE),
        (*SPLIT, "--handoff", "pull", *STORE),
        (*SPLIT, "--router", "append"),
    ],
    ids=" ".join,
)
def test_turns_reuse_answers_and_their_tokens_are_unchanged(flags, tiny_model_dir):
    with running_service(tiny_model_dir("llama"), *ENGINE, *flags) as (_, url):
        for how in (GREEDY, SAMPLED):
            before = moved(url, "stored") if STORE[0] in flags else 0

            def stored(blocks, before=before):
                if STORE[0] in flags:
                    until(lambda: moved(url, "stored") >= before + blocks)

            prompts, answers, cached = converse(url, f"turns {how}", 4, stored, **how)
            if how is GREEDY:
                assert answers == greedy_outputs(tiny_model_dir("llama"), prompts, ANSWER)
                if STORE[0] in flags:  # every turn is handed off
                    # The decode worker is sent only what it has neither received nor generated.
                    blocks = sum(-(-len(prompt) // BLOCK) for prompt in prompts) - sum(cached) // BLOCK
                    assert metric(url, "kv_transfer_bytes_total") == blocks * BLOCK_BYTES
            else:
                alone = [asyncio.run(ask(url, prompt, cache_salt=f"{n}", **how)) for n, prompt in enumerate(prompts)]
                assert alone == [(answer, 0) for answer in answers]
            if "splitwise" not in flags:  # its turns may move between instances
                ends = [len(prompt) + ANSWER for prompt in prompts[:-1]]
                assert cached == [0, *map(reusable, ends)]
        assert asyncio.run(all_blocks_free(url))


def test_answers_are_shared_under_equal_cache_salts_only(tiny_model_dir):
    with running_service(tiny_model_dir("llama"), *ENGINE, "--colocated", "1") as (_, url):
        prompt = tokens("short", 5)  # shorter than a block: only the answer fills blocks
        answer, _ = asyncio.run(ask(url, prompt, cache_salt="x", **GREEDY))
        following = prompt + answer + tokens("next", 5)
        found = [asyncio.run(ask(url, following, cache_salt=salt, **GREEDY))[1] for salt in ("y", "x")]
        assert found == [0, reusable(5 + ANSWER)]


def test_a_replay_finds_the_output_of_a_killed_decode_worker(tiny_model_dir):
    prompt, output = tokens("killed", 50), 1800  # so that the worker is killed before the last token
    (expected,) = greedy_outputs(tiny_model_dir("llama"), [prompt], output)
    with running_service(tiny_model_dir("llama"), *ENGINE, *SPLIT, *STORE) as (process, url):

        def kill_decoder():
            until(lambda: moved(url, "stored") >= 50 // BLOCK + 8)
            kill(process, "decode-0")

        async def run():
            asked = asyncio.create_task(ask(url, prompt, **GREEDY | {"max_tokens": output}))
            await asyncio.to_thread(kill_decoder)
            return await asked

        made, _ = asyncio.run(run())
        assert made == expected
        assert metric(url, "request_replays_total") == 1
        until(lambda: moved(url, "loaded") >= 8)  # blocks of the output that the killed worker had stored
        assert asyncio.run(all_blocks_free(url))
