"""Model facts that are read without loading weights equal those of the loaded model."""

import json
import shutil

import pytest

from twofold.engine.torch.loader import load_model
from twofold.errors import ConfigurationError
from twofold.serving.config import EngineConfig
from twofold.serving.launch.model_source import model_facts


def facts_of(directory, **flags):
    return model_facts(EngineConfig(model=str(directory), **flags))


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_facts_equal_those_of_the_loaded_model(arch, tiny_model_dir):
    facts, loaded = facts_of(tiny_model_dir(arch)), load_model(tiny_model_dir(arch))
    assert (facts.max_model_len, facts.vocab_size) == (loaded.max_model_len, loaded.vocab_size)


def test_longrope_is_limited_to_its_original_length(tiny_model_dir, tmp_path):
    """The torch engine serves the original context length of a longrope model, and vLLM the extended length."""
    config = json.loads((tiny_model_dir("llama") / "config.json").read_bytes())
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = rope | {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    shutil.copytree(tiny_model_dir("llama"), tmp_path / "long")
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    assert facts_of(tmp_path / "long").max_model_len == 512
    everything = config["max_position_embeddings"]
    assert facts_of(tmp_path / "long", engine="vllm").max_model_len == everything > 512


def test_max_model_len_may_shorten_the_context_only(tiny_model_dir):
    assert facts_of(tiny_model_dir("llama"), max_model_len=99).max_model_len == 99
    with pytest.raises(ConfigurationError, match="--max-model-len 1,000,000 is more than the model's"):
        facts_of(tiny_model_dir("llama"), max_model_len=1_000_000)
