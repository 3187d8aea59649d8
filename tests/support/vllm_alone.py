"""Greedy outputs of vLLM without Twofold, the reference for vLLM workers."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from twofold.engine.registry import ENGINES

_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
asked = json.load(sys.stdin)
llm = LLM(
    asked["model"], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32,
    kv_cache_memory_bytes=64 << 20, max_num_seqs=16,
)
how = SamplingParams(temperature=0, max_tokens=asked["output"], ignore_eos=True, detokenize=False)
made = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], how, use_tqdm=False)
print("made", json.dumps([list(each.outputs[0].token_ids) for each in made]))
"""


def greedy_by_vllm(model_dir: Path, prompts: Sequence[list[int]], output: int) -> list[list[int]]:
    """Return the greedy output ids of each prompt from one colocated vLLM, in float32 and in a separate process."""
    asked = json.dumps({"model": str(model_dir), "prompts": list(prompts), "output": output})
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=asked,
        env={**os.environ, **ENGINES["vllm"].environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("made "))
    made: list[list[int]] = json.loads(line.removeprefix("made "))
    return made
