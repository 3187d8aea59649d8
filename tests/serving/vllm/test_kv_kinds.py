"""Hand-offs of models with several kinds of KV cache: windows, states and latent attention."""

import asyncio
import random
import signal
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch

from serving.test_chaos import SOON
from serving.test_disconnects import check_disconnects
from serving.vllm.conftest import ENGINE
from support.api_client import all_blocks_free, block_counts, complete_all, metric, metric_reaches
from support.running_service import named, running_service
from support.tiny_models import SLIDING_WINDOW, write_tiny_model
from support.vllm_alone import outputs_by_vllm

OUTPUT = 40
NOT_CACHED = "--no-enable-prefix-caching"
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 4}
# Of this seed no two most likely tokens are closer than 1e-4; logits of batches and of replays differ by 5e-6.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 32, "seed": 1}
LATENT |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # of the experts, as vLLM names them


def blocks(tokens, size, window=None):
    """Return the number of blocks that a layer needs of a prompt."""
    skipped = 0 if window is None else max(0, tokens + 1 - window)
    return -(-tokens // size) - skipped // size


def windows_bytes(tokens):
    # Two pairs of layers; 2 heads, each with a key and a value of 64 numbers.
    return 2 * (blocks(tokens, 32) + blocks(tokens, 32, SLIDING_WINDOW)) * 32 * 2 * 2 * 64 * 4


def states_bytes(tokens):
    # An attention layer, whose blocks vLLM enlarges to 96 tokens so that one can hold a state, and two states.
    return (blocks(tokens, 96) + 2) * 96 * 2 * 2 * 64 * 4


def latent_bytes(tokens):
    return 3 * blocks(tokens, 16) * 16 * (512 + 64) * 4


def fp8_bytes(tokens):
    # Three layers; 2 heads, each with a key and a value of 64 numbers of a byte.
    return 3 * blocks(tokens, 32) * 32 * 2 * 2 * 64


class Kind(NamedTuple):
    """A model type with changes, flags of its service, and the bytes that a hand-off of some tokens moves."""

    arch: str
    changes: dict[str, int | str]
    flags: tuple[str, ...]
    bytes: Callable[[int], int]
    engine: dict[str, int | str | dict[str, list[str]]]  # engine arguments of the reference


# vLLM's CPU kernel for states does not return the states within a prompt, which prefix caching needs. Its kernel for
# latent attention has blocks of 16 tokens. Its kernel for rotary positions takes the heads of such queries for tokens,
# so that outputs depend on the other requests of a batch: workers do without that kernel.
KINDS = {
    "windows": Kind("gemma3_text", {"head_dim": 64}, ("--handoff", "layer-wise"), windows_bytes, {}),
    "windows-with-sinks": Kind("gpt_oss", {"head_dim": 64}, ("--handoff", "pull"), windows_bytes, {}),
    "states": Kind("nemotron_h", {"head_dim": 64}, ("--handoff", "layer-wise", NOT_CACHED), states_bytes, {}),
    "latent": Kind(
        "deepseek_v3",
        LATENT,
        ("--handoff", "pull", "--block-size", "16"),
        latent_bytes,
        {"block_size": 16, "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
    ),
    "fp8": Kind(
        "llama",
        {"head_dim": 64},
        ("--handoff", "layer-wise", "--engine-args", '{"kv_cache_dtype": "fp8"}'),
        fp8_bytes,
        {"kv_cache_dtype": "fp8"},
    ),
}


@cache
def prompts():
    """Return prompts with lengths around multiples of block sizes, shorter and longer than the window."""
    draw, window = random.Random(3), SLIDING_WINDOW
    edges = [1, 2, 31, 32, 33, 95, 96, 97, window - 1, window, window + 1, window + 31, window + 32, window + 33]
    lengths = [*edges, 2 * window, 3 * window + 1, 700, 1500, *(draw.randint(1, 600) for _ in range(6))]
    return [[draw.randint(10, 500) for _ in range(length)] for length in lengths]


def outputs(url, **how):
    return asyncio.run(complete_all(url, prompts(), at_once=12, max_tokens=OUTPUT, ignore_eos=True, **how))


async def outputs_with_kills(process, url, **how):
    """Return the outputs of requests during which each worker is killed once."""
    asked = asyncio.create_task(asyncio.to_thread(outputs, url, **how))
    for role in ("prefill", "decode"):
        done = await asyncio.to_thread(metric, url, "request_success_total")
        (worker,) = named(process, f"{role}.*")
        worker.send_signal(signal.SIGKILL)
        await asyncio.to_thread(metric_reaches, url, "request_success_total", done + 2)
    return await asked


@pytest.mark.covers(
    engine="vllm",
    model=("gemma3_text", "gpt_oss", "nemotron_h", "deepseek_v3"),
    feature=("tokens", "handoff", "replay"),
)
@pytest.mark.covers(engine="vllm", feature=("windows", "states", "latent"))
@pytest.mark.covers(engine="vllm", model="llama", feature="fp8")
@pytest.mark.parametrize("name", KINDS)
def test_split_equals_one_vllm(name, tmp_path):
    """Greedy and sampled outputs equal those of one vLLM, also when clients leave and workers die; blocks are freed."""
    if name == "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's CPU build needs AVX-512 for a KV cache in FP8")
    kind = KINDS[name]
    model = write_tiny_model(kind.arch, tmp_path / kind.arch, **kind.changes)
    greedy, sampled = outputs_by_vllm(model, prompts(), OUTPUT, keyed=SAMPLED, **kind.engine)
    split = ("--prefill", "1", "--decode", "1", "--transport", "nixl", "--kv-checksums", *kind.flags)
    with running_service(model, *ENGINE, *SOON, *split, log=tmp_path / "log") as (process, url):
        before = block_counts(url)

        assert outputs(url, temperature=0) == greedy
        assert outputs(url, **SAMPLED) == sampled
        moved = 2 * sum(kind.bytes(len(prompt)) for prompt in prompts())
        assert metric_reaches(url, "kv_transfer_bytes_total", moved)
        if not metric(url, "request_replays_total"):
            assert metric(url, "kv_transfer_bytes_total") == moved
        check_disconnects(url, 40)
        for how, wanted in (({"temperature": 0}, greedy), (SAMPLED, sampled)):
            assert asyncio.run(outputs_with_kills(process, url, **how)) == wanted
        assert metric(url, "request_replays_total")
        assert asyncio.run(all_blocks_free(url))
        assert block_counts(url) == before
