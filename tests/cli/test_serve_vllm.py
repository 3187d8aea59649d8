"""`twofold serve --engine vllm` refuses what vLLM does in its own way, and what is not installed."""

import sys
from importlib.util import find_spec

import pytest

from twofold.cli.main import main


@pytest.fixture
def refusal(monkeypatch, capsys, tiny_model_dir):
    """The last line that is said; found before any process is started."""

    def run(*flags):
        command = ["twofold", "serve", str(tiny_model_dir("llama")), "--engine", "vllm", *flags]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run


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
    """They would change nothing."""
    assert f"{flags[0]} is for --engine torch" in refusal(*flags)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed(refusal):
    """It says what to install."""
    assert "pip install 'twofold[vllm]'" in refusal()
