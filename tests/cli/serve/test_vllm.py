"""Tests of `twofold serve --engine vllm`."""

from functools import partial
from importlib.util import find_spec

import pytest


@pytest.fixture
def refusal(refused, model):
    """Return a function that runs `twofold serve --engine vllm` and returns its error message."""
    return partial(refused, "serve", model, "--engine", "vllm")


@pytest.mark.parametrize(
    "flags",
    [
        ("--tp", "2"),
        ("--decode-pp", "2"),
        ("--swap-space", "1GiB"),
        ("--kv-store-dram", "1GiB"),
        ("--kv-eviction", "lfu"),
        ("--pipeline-chunk", "64"),
        ("--journal", "decisions"),
    ],
    ids=lambda flags: flags[0],
)
def test_flags_of_our_own_scheduler_and_pool(flags, refusal):
    """Flags of the built-in scheduler and KV pool are errors with `--engine vllm`."""
    assert f"{flags[0]} needs --engine torch" in refusal(*flags)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed(refusal):
    """Without vLLM, the error of `--engine vllm` contains the pip command that installs it."""
    assert "pip install 'twofold[vllm]'" in refusal()
