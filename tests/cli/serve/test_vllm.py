"""Tests of `twofold serve --engine vllm`."""

from functools import partial
from importlib.util import find_spec

import pytest

from twofold.cli.serve.engine_args import engine_args, lora_adapters
from twofold.cli.serve.settings import ServeSettings
from twofold.instance import Role


@pytest.fixture
def refusal(refused, model):
    """Return a function that runs `twofold serve --engine vllm` and returns its error message."""
    return partial(refused, "serve", model, "--engine", "vllm")


@pytest.mark.refuses(engine="vllm", feature=("store", "journal", "pipeline-chunks"))
@pytest.mark.parametrize(
    "flags",
    [
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


def settings(**given):
    return ServeSettings(model="m", engine="vllm", **given)


def test_options_of_vllm_become_its_flags(tmp_path):
    """Options are read from YAML, JSON and lists of flags; those of a phase follow the common ones."""
    file = tmp_path / "options.yaml"
    file.write_text("max_logprobs: 5\nenable-lora: true\ntrust_remote_code: false\nlora_target_modules: [a, b]\n")
    given = settings(
        engine_args=(str(file), '{"hf_overrides": {"a": [1]}}', '["-O1"]'), decode_engine_args=('{"seed": 3}',)
    )
    common = (
        *("--max-logprobs=5", "--enable-lora", "--no-trust-remote-code", "--lora-target-modules", "a", "b"),
        *('--hf-overrides={"a":[1]}', "-O1"),
    )
    assert engine_args(given) == {Role.PREFILL: common, Role.DECODE: (*common, "--seed=3"), Role.MIXED: common}


def test_adapters_enable_lora(tmp_path, refusal, monkeypatch):
    """Every adapter has a slot, and one slot stays empty; other directories are refused."""
    monkeypatch.setattr("twofold.engine.registry.EngineTraits.check_installed", lambda _: None)
    (tmp_path / "adapter_config.json").write_text("{}")
    given = settings(lora_modules=(f"a={tmp_path}", f"b={tmp_path}"), engine_args=('{"max_loras": 4}',))
    assert engine_args(given)[Role.DECODE] == ("--enable-lora", "--max-loras=3", "--max-loras=4")
    assert lora_adapters(given) == {"a": str(tmp_path), "b": str(tmp_path)}
    for wrong in ("a", f"={tmp_path}", f"a={tmp_path / 'other'}"):
        assert f"--lora-modules {wrong} is not a new NAME=DIR" in refusal("--lora-modules", wrong)


@pytest.mark.parametrize("config", ["engine-args: {seed: 3}", "engine-args: ['{\"seed\": 3}']"])
def test_options_from_a_config_file_and_after_two_dashes(config, tmp_path, twofold, monkeypatch):
    """`--config` may contain a mapping; the command line after `--`, which overrides it, has flags of vLLM."""
    (tmp_path / "c.yaml").write_text(config)
    made = []
    monkeypatch.setattr("twofold.cli.serve.run.run", lambda settings: made.append(engine_args(settings)[Role.MIXED]))
    for flags in ((), ("--", "--max-logprobs", "5")):
        assert twofold("serve", "m", "--config", tmp_path / "c.yaml", *flags).code == 0
    assert made == [("--seed=3",), ("--max-logprobs", "5")]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--engine-args", "nowhere.yaml"), "--engine-args nowhere.yaml cannot be read"),
        (("--engine-args", "{a"), "--engine-args {a is not YAML"),
        (("--engine-args", "[{}]"), "--engine-args [{}] is not a mapping of options: Expected `str`"),
        (("--max-num-seqs", "4", "--", "--max-num-seqs", "8"), "sets max_num_seqs, as --max-num-seqs does: give one"),
        (("--dtype", "float32", "--decode-engine-args", '{"dtype": "float16"}'), "--decode-engine-args sets dtype"),
        (("--colocated", "1", "--prefill-engine-args", "{}"), "--prefill-engine-args is for a service with separate"),
    ],
)
def test_options_that_cannot_be_used(flags, reason, refusal, monkeypatch):
    monkeypatch.setattr("twofold.engine.registry.EngineTraits.check_installed", lambda _: None)
    assert reason in refusal(*flags)


def test_other_engines_have_no_options(refused, model):
    assert "--engine-args needs --engine vllm" in refused("serve", model, "--", "--seed", "3")
