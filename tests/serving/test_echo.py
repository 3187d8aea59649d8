"""Log probabilities of prompts equal those of transformers, with prompts in one piece or in chunks, split or not."""

import asyncio
import random

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.api_client import all_blocks_free, served_name
from support.flags import COLOCATED, SPLIT

TOP = 3
WAYS = {
    "split": SPLIT,
    "chunked": (*COLOCATED, "--max-num-batched-tokens", "64"),
    "pipelined": ("--prefill", "1", "--decode", "1", "--pp", "2"),
}


def random_prompts():
    draw = random.Random(2)
    return [[draw.randint(10, 500) for _ in range(length)] for length in (1, 2, 16, 17, 150, 300)]


async def echoes(url, prompts, **fields):
    async with aiohttp.ClientSession() as session:
        name = await served_name(session, url)

        async def one(prompt):
            body = {"model": name, "prompt": prompt, "echo": True, "logprobs": TOP, "temperature": 0, **fields}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer

        return await asyncio.gather(*map(one, prompts))


def expected_scores(model_dir, prompts):
    """Return for each prompt the log probabilities [tokens − 1, vocabulary] of the tokens after the first."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1) for prompt in prompts]


@pytest.mark.covers(engine="torch", model="llama", feature="logprobs")
@pytest.mark.parametrize("way", WAYS)
def test_prompt_logprobs_equal_those_of_transformers(way, service, tiny_model_dir):
    prompts, url = random_prompts(), service("llama", WAYS[way])
    # The second round would find the prompts in the prefix cache.
    answers = [asyncio.run(echoes(url, prompts, max_tokens=tokens)) for tokens in (1, 0)]
    for prompt, wanted, *found in zip(
        prompts, expected_scores(tiny_model_dir("llama"), prompts), *answers, strict=True
    ):
        for answer, made in zip(found, (1, 0), strict=True):
            assert answer["usage"]["completion_tokens"] == made
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "length"
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(prompt) + made
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            scores = torch.tensor(logprobs["token_logprobs"][1 : len(prompt)])
            own = wanted.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
            assert torch.allclose(scores, own, atol=1e-4)
            for tops, row in zip(logprobs["top_logprobs"][1 : len(prompt)], wanted, strict=True):
                best = row.topk(TOP).values
                assert torch.allclose(torch.tensor(sorted(tops.values(), reverse=True)[:TOP]), best, atol=1e-4)
    assert asyncio.run(all_blocks_free(url))


def test_the_text_begins_with_the_prompt(service):
    """The answer to a text repeats it, streamed or not, and offsets count its characters."""
    url, prompt = service("llama", SPLIT), "The quick brown fox"
    (answer,) = asyncio.run(echoes(url, [prompt], max_tokens=4))
    (plain,) = asyncio.run(echoes(url, [prompt], max_tokens=4, echo=False))
    (alone,) = asyncio.run(echoes(url, [prompt], max_tokens=0, logprobs=None))
    text = answer["choices"][0]["text"]
    assert text == prompt + plain["choices"][0]["text"]
    assert alone["choices"][0]["text"] == prompt
    logprobs = answer["choices"][0]["logprobs"]
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if 0 < offset < len(prompt):  # not the start token, nor the output, which may have parts of characters
            assert prompt[offset:].startswith(token)
