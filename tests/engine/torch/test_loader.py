"""Loading of models: their properties, and errors for invalid or unsupported models."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from support.device import DEVICE
from support.tiny_models import SLIDING_WINDOW
from twofold.engine.base import LayerShape
from twofold.engine.torch.loader import load_model
from twofold.errors import ModelError

TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.fixture
def copied(tiny_model_dir, tmp_path):
    """Return the directory of a copy of the tiny Llama, which a test may modify."""
    return shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")


@pytest.fixture
def config_only(tmp_path):
    """Return a function that writes a model directory with a config.json but without weights."""

    def directory(model_type, **values):
        AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path)
        return tmp_path

    return directory


def change_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_reads_the_properties_of_a_model(loaded):
    model = loaded("llama")
    assert model.layers == (LayerShape(kv_heads=2, key_dim=32, value_dim=32),) * 3
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (2048, 512, (2,))
    assert (model.dtype_name, model.itemsize) == ("float32", 4)
    assert model.layout(16).bytes_per_token == 3 * 2 * (32 + 32) * 4


def test_shapes_come_from_the_layers_themselves(loaded):
    """Head sizes are read from the model's layers, not computed from the config."""
    assert loaded("deepseek_v3").layers[0] == LayerShape(kv_heads=4, key_dim=48, value_dim=24)
    assert loaded("qwen3").layers[0] == LayerShape(kv_heads=2, key_dim=48, value_dim=48)


def test_windows_come_from_the_masks(loaded):
    """Each layer's sliding window is read from its attention mask."""
    assert loaded("gemma2").windows == (SLIDING_WINDOW, None, SLIDING_WINDOW, None)
    assert loaded("llama").windows == (None, None, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(tiny_model_dir, dtype):
    """The KV cache has the dtype in which the model is loaded."""
    model = load_model(tiny_model_dir("llama"), dtype=dtype)
    assert model.dtype_name == dtype
    assert model.itemsize == getattr(torch, dtype).itemsize


def test_auto_dtype_is_that_of_the_checkpoint(copied):
    load_model(copied, dtype="bfloat16").model.save_pretrained(copied)
    assert load_model(copied).dtype_name == "bfloat16"


@pytest.mark.parametrize(("given", "expected"), [(7, (7,)), ([7, 9], (7, 9))])
def test_generation_config_has_priority_for_eos(copied, given, expected):
    """EOS ids come from generation_config.json, which contains one id or a list of ids."""
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert load_model(copied).eos_token_ids == expected


def test_loads_a_model_without_eos(copied):
    (copied / "generation_config.json").unlink()
    change_config(copied, eos_token_id=None)
    assert load_model(copied).eos_token_ids == ()


def test_longrope_limits_the_context_to_its_original_length(copied):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    change_config(copied, rope_parameters=rope | factors)
    # In longer contexts, LongRoPE would change the rotary embeddings of all sequences in the batch.
    assert load_model(copied).max_model_len == 512


def test_random_weights_from_a_config_alone(config_only):
    """Random weights depend only on the seed, and creating them does not change torch's global random state."""
    directory = config_only("llama", **TINY)
    state = torch.random.get_rng_state()
    first, again, other = (load_model(directory, seed=seed).model.lm_head.weight.clone() for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


class TestMistakes:
    """Invalid model directories and dtypes raise a ModelError that names the cause."""

    def test_no_such_directory(self, tmp_path):
        with pytest.raises(ModelError, match=r"there is no model directory .*gone"):
            load_model(tmp_path / "gone")

    def test_a_file(self, tmp_path):
        (tmp_path / "model.gguf").touch()
        with pytest.raises(ModelError, match="there is no model directory"):
            load_model(tmp_path / "model.gguf")

    def test_no_config(self, tmp_path):
        with pytest.raises(ModelError, match=r"has no config\.json"):
            load_model(tmp_path)

    def test_broken_config(self, copied):
        (copied / "config.json").write_text("{")
        with pytest.raises(ModelError, match=r"config\.json cannot be used"):
            load_model(copied)

    def test_unknown_kind(self, copied):
        change_config(copied, model_type="telepathy")
        with pytest.raises(ModelError, match="telepathy"):
            load_model(copied)

    def test_no_weights(self, config_only):
        with pytest.raises(ModelError, match="weights cannot be loaded"):
            load_model(config_only("llama", **TINY))

    def test_truncated_weights(self, copied):
        weights = copied / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        with pytest.raises(ModelError, match="weights cannot be loaded"):
            load_model(copied)

    def test_missing_weights(self, copied):
        """Weights that lack a layer of the config are rejected."""
        change_config(copied, num_hidden_layers=4)
        # transformers would fill the missing layers with random weights.
        with pytest.raises(ModelError, match=r"weights lack model\.layers\.3.* and 8 more"):
            load_model(copied)

    def test_unknown_dtype(self, copied):
        with pytest.raises(ModelError, match="int4 is unknown: choose one of auto, float32"):
            load_model(copied, dtype="int4")

    def test_sentences_are_single_lines(self, copied):
        change_config(copied, hidden_size="wide")
        with pytest.raises(ModelError) as raised:
            load_model(copied)
        assert "\n" not in str(raised.value)


@pytest.mark.refuses(engine="torch", feature="states")
@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("t5", {"d_model": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}, "encoder-decoder"),
        ("bert", TINY, "not causal"),
        ("mamba", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}, "state other than a KV cache"),
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64}, "position_ids"),
        ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "attention interface"),
        ("stablelm", TINY, "does not pass its arguments"),
        ("minimax", {**TINY, "num_key_value_heads": 2}, "calls attention"),
        (
            "llama4_text",
            {**TINY, "num_key_value_heads": 2, "head_dim": 16, "attention_chunk_size": 32},
            "neither causal nor a sliding window",
        ),
    ],
)
def test_refuses_models_that_it_would_compute_wrongly(config_only, model_type, values, reason):
    with pytest.raises(ModelError, match=reason):
        load_model(config_only(model_type, **values), seed=0)


def test_refuses_unknown_kinds_of_attention(tiny_model_dir, monkeypatch):
    """A model is rejected if it does not use standard attention."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward
    monkeypatch.setattr(
        modeling_llama,
        "eager_attention_forward",
        lambda *args, scaling, **rest: plain(*args, scaling=2 * scaling, **rest),
    )
    with pytest.raises(ModelError, match="LlamaAttention has an unsupported kind of attention"):
        load_model(tiny_model_dir("llama"))


def test_a_loaded_process_can_fork(tiny_model_dir):
    """A child process that is forked after the loading of a model can run the model."""
    script = """
import os, sys, time, torch
torch.set_num_threads(1)
from twofold.engine.base import SequenceStep
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import load_model
from twofold.engine.torch.pool import KvPool
from twofold.request import SamplingParams
threads = len(os.listdir("/proc/self/task"))  # some builds of libraries start one when they are imported
model = load_model(sys.argv[1])
while len(os.listdir("/proc/self/task")) > threads:  # a thread is listed for a moment after it was joined
    time.sleep(0.01)
if os.fork() == 0:
    torch.set_num_threads(2)
    step = SequenceStep("a", list(range(3, 300)), 0, list(range(19)), SamplingParams(max_tokens=1, temperature=0.0))
    engine = TorchEngine(model.to(sys.argv[2]), KvPool(model.layout(16), 32, device=sys.argv[2]))
    print(engine.run([step])[0].token_id >= 0, flush=True)
    os._exit(0)
os.wait()
"""
    made = subprocess.run(
        [sys.executable, "-c", script, tiny_model_dir("llama"), DEVICE],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as in the process that forks workers
        check=True,
    )
    assert made.stdout.split() == ["True"]
    assert made.stderr == ""
