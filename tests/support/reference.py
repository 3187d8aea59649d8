"""Greedy outputs computed by transformers, as the reference for generated tokens."""

from collections.abc import Sequence
from pathlib import Path


def greedy_outputs(model_dir: Path, prompts: Sequence[list[int]], output: int, **options: float) -> list[list[int]]:
    """Return the greedy output ids of each prompt, computed by transformers in float32 with options of `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output,
                min_new_tokens=output,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
            outputs.append(made[0, len(prompt) :].tolist())
    return outputs
