"""A plugin for vLLM in the workers of a service, which counts drafts, and a made EAGLE head."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

COUNTS = "TEST_VLLM_DRAFT_COUNTS"


def eagle_head(model_dir, directory):
    """Write an EAGLE head of a Llama to `directory`: one random layer on top of the model's last hidden states.

    It often drafts the last token again. The layer's attention makes drafts depend on the KV of all previous tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config, draw = model.config, torch.Generator().manual_seed(0)
    weights = {"fc.weight": torch.eye(config.hidden_size, 2 * config.hidden_size).roll(config.hidden_size, 1)}
    for name, value in model.model.layers[0].state_dict().items():
        if name != "input_layernorm.weight":  # which EAGLE leaves out
            drawn = torch.randn(value.shape, generator=draw) / value.shape[-1] ** 0.5
            weights[f"layers.0.{name}"] = drawn * 0.3 if "o_proj" in name or "down_proj" in name else drawn
    config.num_hidden_layers = 1
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors")
    return directory


def count_drafts(directory, monkeypatch):
    """Let vLLM in this process's children load the plugin, which writes its counts to `directory`."""
    facts = directory / "twofold_test-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: twofold-test\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\ntest = support.vllm_drafts:register\n")
    paths = [str(directory), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(COUNTS, str(directory / "counts"))


def draft_counts(directory):
    """Return the numbers of drafted and accepted tokens, and the sum of the drafted token ids."""
    found = [json.loads(path.read_text()) for path in directory.glob("counts.*")]
    return tuple(map(sum, zip(*found, strict=True)))


def register():
    """Count drafts in this process. vLLM calls it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "counts"):
        return
    count, update, Scheduler.counts = Scheduler.make_spec_decoding_stats, Scheduler.update_from_output, [0, 0, 0]

    def also_count(self, stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id):
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        self.counts[0] += num_draft_tokens - invalid
        self.counts[1] += num_accepted_tokens
        Path(f"{os.environ[COUNTS]}.{os.getpid()}").write_text(json.dumps(self.counts))
        return count(self, stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

    def also_sum(self, scheduler_output, model_runner_output):
        self.counts[2] += sum(map(sum, scheduler_output.scheduled_spec_decode_tokens.values()))  # invalid ones are 0
        return update(self, scheduler_output, model_runner_output)

    Scheduler.make_spec_decoding_stats, Scheduler.update_from_output = also_count, also_sum
