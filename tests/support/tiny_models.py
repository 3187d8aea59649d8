"""Tiny models of several architectures, written to disk with tokenizers, so that tests download no models."""

from functools import cache
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "qwen3", "gpt2", "opt", "gemma2", "mixtral")
SLIDING_WINDOW = 128  # tokens; every other layer of gemma2

_SHAPE = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "intermediate_size": 320}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 48},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4},
    "opt": {**_SHAPE, "ffn_dim": 320, "word_embed_proj_dim": 128},
    "gemma2": {
        **_GROUPED,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": SLIDING_WINDOW,
        "attn_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_text": {
        **_GROUPED,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 24,
    },
    # State-space layers (M), attention (*) and a multilayer perceptron (-).
    "nemotron_h": {
        **_GROUPED,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **_GROUPED,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": SLIDING_WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # Multi-head latent attention: values are narrower than keys.
    "deepseek_v3": {
        **_SHAPE,
        "num_key_value_heads": 4,
        "intermediate_size": 320,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 48,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 24,
    },
}


def write_tiny_model(
    arch: str, directory: Path, *, seed: int = 0, vocab_size: int = 512, max_positions: int = 2048, **changes: Any
) -> Path:
    """Write a tiny model of the transformers type `arch` to a directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from twofold.engine.torch.loader import no_progress_bars

    tokenizer = _tokenizer(vocab_size, max_positions)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    wide = {"initializer_range": 0.09, "init_std": 0.09}
    positions = {"n_positions" if arch == "gpt2" else "max_position_embeddings": max_positions}
    config = AutoConfig.for_model(
        arch,
        vocab_size=vocab_size,
        tie_word_embeddings=False,
        **positions,
        **wide,
        **special,
        **_CONFIGS[arch] | changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**special)
    with no_progress_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


def write_eagle_head(model_dir: Path, directory: Path) -> Path:
    """Write an EAGLE head of a tiny Llama to a directory: one random layer on top of the model's last hidden states.

    It often drafts the last token again. The layer's attention makes drafts depend on the KV of all previous tokens.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config, draw = AutoConfig.from_pretrained(model_dir), torch.Generator().manual_seed(0)
    weights = {"fc.weight": torch.eye(config.hidden_size, 2 * config.hidden_size).roll(config.hidden_size, 1)}
    for name, value in load_file(model_dir / "model.safetensors").items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:  # EAGLE has no input norm
            drawn = torch.randn(value.shape, generator=draw) / value.shape[-1] ** 0.5
            scale = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
            weights[name.removeprefix("model.")] = drawn * scale
    config.num_hidden_layers = 1
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors")
    return directory


@cache
def _tokenizer(vocab_size: int, max_positions: int):
    """Train a tokenizer once per test process, because training takes most of the time of writing a model."""
    from twofold.engine.model_factory import train_tokenizer

    return train_tokenizer(vocab_size, max_positions, corpus_characters=200_000)
