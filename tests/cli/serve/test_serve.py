"""Tests of invalid arguments of `twofold serve`."""

import re
import socket
import subprocess
import sys
from functools import partial

import pytest
import torch

from twofold.cli.serve.config import service_config
from twofold.cli.serve.settings import ServeSettings
from twofold.errors import UserError
from twofold.serving.worker.torch_parts import prepare


@pytest.fixture
def early_refusal(refused, model):
    """Return a function that runs `twofold serve` in this process and returns its error message."""
    return partial(refused, "serve", model)


def refusal(*arguments):
    """Run `twofold serve` in a subprocess; return its error message."""
    command = [sys.executable, "-m", "twofold.cli.main", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("twofold: ")
    return last


def unprepared(model, **flags):
    """Prepare a service with invalid flags; return the error message."""
    with pytest.raises(UserError) as refused:
        prepare(service_config(ServeSettings(model=str(model), **flags)), lambda _: None)
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_a_start_says_how_long_loading_takes(model):
    said = []
    prepare(service_config(ServeSettings(model=str(model))), said.append)
    assert said[0] == "loading the model"
    assert re.fullmatch(r"loaded \S+ GiB of weights in \d+\.\d s, for all workers of this host", said[1])


def test_a_wrong_flag(early_refusal):
    """The error for an unknown flag of `twofold serve` names this flag."""
    assert "--prefil" in early_refusal("--prefil", "1")


def test_a_missing_model_directory(tmp_path, refused):
    """The error for a missing model directory suggests `twofold model create`."""
    assert "twofold model create" in refused("serve", tmp_path / "nowhere")


def test_a_directory_that_is_no_model(tmp_path, refused):
    """The error for a directory without a model names the missing config.json."""
    assert "config.json" in refused("serve", tmp_path)


def test_a_port_in_use(early_refusal):
    """If the HTTP port is in use, `twofold serve` fails before it starts a process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in early_refusal("--port", str(port))


def test_too_little_memory(model):
    """If the KV cache is too small for the model, the error contains the minimum size."""
    said = refusal(model, "--port", "0", "--kv-cache-memory-bytes", "64K")
    assert "--kv-cache-memory-bytes to at least" in said


def test_more_memory_than_the_machine_has(model):
    assert "this machine has" in unprepared(model, kv_cache_memory_bytes=9000 << 30)


def test_a_context_longer_than_the_model_s(model):
    """`--max-model-len` above the model's context length is an error."""
    assert "more than the model's" in unprepared(model, max_model_len=1_000_000)


def test_a_model_that_cannot_be_divided(model):
    """Tensor parallelism must divide the number of KV heads."""
    said = unprepared(model, decode_tp=4)
    assert "2 key-value heads, which 4 tensor ranks (TP4 PP1) cannot share evenly" in said


def test_a_device_that_is_not_there(model):
    if torch.version.cuda is None:
        assert "needs torch with CUDA" in unprepared(model, device="cuda")


@pytest.mark.parametrize(
    "flags",
    [
        ("--colocated", "2", "--prefill", "1"),
        ("--prefill", "1", "--decode", "0"),
        ("--router", "best"),
        ("--handoff", "slow"),
        ("--tp", "0"),
        ("--prefill-tp", "2", "--colocated", "1"),
        ("--pipeline-chunk", "512"),
        ("--cache-retention-share", "0.5", "--no-enable-prefix-caching"),
        ("--cache-retention-share", "2"),
        ("--kv-eviction", "fifo"),
        ("--kv-eviction", "lfu", "--no-enable-prefix-caching"),
        ("--cache-retention", "-1"),
        ("--pipeline-chunk", "512", "--decode-pp", "2"),
        ("--max-num-batched-tokens", "512", "--pipeline-chunk", "512", "--prefill-pp", "2"),
        ("--transport", "curve", "--decode-pp", "2"),
        ("--kv-checksums", "--tp", "2"),
        ("--dtype", "int3"),
        ("--gpu-memory-utilization", "1.5"),
        ("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "1GiB"),
        ("--kv-cache-memory-bytes", "much"),
        ("--max-num-batched-tokens", "0"),
        ("--max-num-batched-tokens", "some"),
        ("--port", "70000"),
        ("--max-body-bytes", "much"),
        ("--api-key", "two words"),
        ("--api-keys", "/nowhere/keys.txt"),
        ("--host", "0.0.0.0", "--port", "0"),  # noqa: S104 it is refused without a key
    ],
)
def test_invalid_flags_and_combinations(early_refusal, flags):
    """`twofold serve` rejects invalid values and combinations of flags before it starts a process."""
    assert flags[0] in early_refusal(*flags)


@pytest.mark.parametrize(
    ("flag", "value", "right"),
    [
        ("--log-format", "xml", "text, json"),
        ("--otlp-endpoint", "localhost:4318", "http://localhost:4318"),
        ("--slo", "fast", "ttft=2"),
    ],
)
def test_wrong_telemetry(early_refusal, flag, value, right):
    said = early_refusal(flag, value)
    assert repr(value) in said
    assert right in said
