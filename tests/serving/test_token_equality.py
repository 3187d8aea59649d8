"""The output of a service with separate prefill and decode equals the model's own output in float32."""

import asyncio
import random

import pytest

from support.api_client import all_blocks_free, complete_all
from support.chaos import PENALIZED
from support.flags import COLOCATED, SPLIT
from support.reference import greedy_outputs

ARCHITECTURES = ["qwen3", "gpt2", "gemma2", "mixtral", "llama"]
PROMPTS, LONGEST, OUTPUT = 100, 1500, 12
VOCABULARY = (10, 500)


def random_prompts(seed):
    """Return 100 random prompts of 1 to 1,500 tokens, including lengths at block boundaries."""
    draw = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, LONGEST] + [round(LONGEST ** draw.random()) for _ in range(PROMPTS - 6)]
    return [[draw.randint(*VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.covers(engine="torch", model=ARCHITECTURES, feature="handoff")
@pytest.mark.covers(engine="torch", transport="shared_memory", feature="handoff")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_output_equals_generate(arch, service, tiny_model_dir):
    """Prompts sent one at a time, in batches or at random times get the tokens of transformers' `generate`."""
    prompts = random_prompts(seed=ARCHITECTURES.index(arch))
    expected = greedy_outputs(tiny_model_dir(arch), prompts, OUTPUT)
    url = service(arch, SPLIT)
    ways = {
        "alone": {"at_once": 1},
        "in batches": {"at_once": 20},
        "at random times": {"at_once": PROMPTS, "spread_s": 5.0},
    }
    for way, how in ways.items():
        made = asyncio.run(complete_all(url, prompts, **how, max_tokens=OUTPUT, temperature=0, ignore_eos=True))
        wrong = [i for i in range(PROMPTS) if made[i] != expected[i]]
        assert not wrong, f"{way}: prompts {wrong[:5]} differ, of {[len(prompts[i]) for i in wrong[:5]]} tokens"
    assert asyncio.run(all_blocks_free(url))


@pytest.mark.covers(engine="torch", model="llama", feature="penalties")
def test_repetition_penalty_equals_generate(service, tiny_model_dir):
    """A decode worker penalizes the tokens of the prompt, which only its prefill worker has computed."""
    prompts = random_prompts(seed=8)[:24]
    expected = greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT, repetition_penalty=1.5)
    how = {"max_tokens": OUTPUT, "temperature": 0, "repetition_penalty": 1.5, "ignore_eos": True}
    assert asyncio.run(complete_all(service("llama", SPLIT), prompts, at_once=12, **how)) == expected
    assert expected != greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT), "the penalty must matter"


@pytest.mark.covers(engine="torch", model="llama", feature=("sampling", "colocated", "layer-wise", "serialized"))
@pytest.mark.parametrize("adjusted", [{}, PENALIZED], ids=["plain", "penalized"])
def test_sampled_output_depends_on_the_seed_alone(adjusted, service):
    """Split and colocated services sample the same tokens for a seed, for any request order and hand-off mode."""
    prompts = random_prompts(seed=7)[:24]
    how = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "ignore_eos": True, **adjusted}
    runs = [
        asyncio.run(
            complete_all(service("llama", flags), prompts, at_once=at_once, spread_s=spread, **how | {"seed": 11})
        )
        for flags, at_once, spread in [
            (SPLIT, 1, 0.0),
            (SPLIT, 24, 1.0),
            (COLOCATED, 24, 0.5),
            ((*SPLIT, "--handoff", "serialized"), 24, 0.5),
        ]
    ]
    assert runs[0] == runs[1] == runs[2] == runs[3]
    other = asyncio.run(complete_all(service("llama", SPLIT), prompts, at_once=24, **how | {"seed": 12}))
    assert other != runs[0], "another seed must change the output"
