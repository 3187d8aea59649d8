"""LoRA adapters for tests, with random weights."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_TARGETS = ("q_proj", "v_proj", "down_proj")


def write_adapter(model_dir: Path, directory: Path, *, seed: int, rank: int = 4) -> Path:
    """Write a LoRA adapter, in PEFT's format, that changes the outputs of a tiny Llama model."""
    draw, made = torch.Generator().manual_seed(seed), {}
    with safe_open(model_dir / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  (no mapping)
            module = name.removesuffix(".weight")
            if not module.endswith(_TARGETS):
                continue
            rows, columns = weights.get_slice(name).get_shape()
            made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) * 0.1
            made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * 0.1
    directory.mkdir(parents=True)
    save_file(made, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(_TARGETS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
