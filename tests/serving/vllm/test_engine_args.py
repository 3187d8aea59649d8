"""Options of vLLM reach the engine cores of workers, and wrong ones end the service while it starts."""

import json
import os
import re
import subprocess
import sys

import pytest

from twofold.bench.services import served
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError

FLAGS = ("--engine", "vllm", "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB")
DRAFTS = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}'
# Options, and where the configuration of an engine core has them.
OPTIONS = {
    "max_logprobs": (7, "model_config.max_logprobs"),
    "seed": (11, "model_config.seed"),
    "trust_remote_code": (True, "model_config.trust_remote_code"),
    "code_revision": ("tested", "model_config.code_revision"),
    "generation_config": ("vllm", "model_config.generation_config"),
    "max_model_len": (512, "model_config.max_model_len"),
    "hf_overrides": ({"rms_norm_eps": 0.125}, "model_config.hf_config.rms_norm_eps"),
    "logits_processors": (["support.vllm_logits:KeepsLogits"], "model_config.logits_processors"),
    "load_format": ("dummy", "load_config.load_format"),
    "pt_load_map_location": ("cpu:0", "load_config.pt_load_map_location"),
    "ignore_patterns": (["old/*", "older/*"], "load_config.ignore_patterns"),
    "num_gpu_blocks_override": (50, "cache_config.num_gpu_blocks_override"),
    "prefix_caching_hash_algo": ("sha256_cbor", "cache_config.prefix_caching_hash_algo"),
    "max_num_seqs": (9, "scheduler_config.max_num_seqs"),
    "max_num_batched_tokens": (600, "scheduler_config.max_num_batched_tokens"),
    "long_prefill_token_threshold": (128, "scheduler_config.long_prefill_token_threshold"),
    "scheduling_policy": ("priority", "scheduler_config.policy"),
    "scheduler_reserve_full_isl": (False, "scheduler_config.scheduler_reserve_full_isl"),
    "stream_interval": (3, "scheduler_config.stream_interval"),
    "disable_custom_all_reduce": (True, "parallel_config.disable_custom_all_reduce"),
    "enable_lora": (True, "lora_config.max_loras"),
    "max_loras": (2, "lora_config.max_loras"),
    "max_lora_rank": (32, "lora_config.max_lora_rank"),
    "max_cpu_loras": (3, "lora_config.max_cpu_loras"),
    "kv_cache_metrics": (True, "observability_config.kv_cache_metrics"),
    "enable_mfu_metrics": (True, "observability_config.enable_mfu_metrics"),
    "additional_config": ({"ours": 1}, "additional_config"),
    "compilation_config": ({"debug_dump_path": "/nowhere"}, "compilation_config.debug_dump_path"),
    "optimization_level": (1, "optimization_level"),
}
SHOWN = {  # as the configuration has them, where it differs
    "hf_overrides": "0.125",
    "logits_processors": "['support.vllm_logits:KeepsLogits', 'twofold.engine.vllm.sampling:KeyedSampling']",
    "enable_lora": "2",
    "compilation_config": "/nowhere",
}
_SCRIPT = """
import json, operator, sys
from msgspec.structs import replace
from twofold.cli.serve.config import service_config
from twofold.cli.serve.settings import ServeSettings
from twofold.serving.worker.vllm.parts import prepare
asked = json.load(sys.stdin)
service = service_config(ServeSettings(engine="vllm", kv_cache_memory_bytes=64 << 20, **asked["settings"]))
said = []
factory = prepare(replace(service, run_dir="."), said.append)
core = factory.parts(service.workers[-1], 1).engine._core
made = [f"{operator.attrgetter(place)(core.config)}" for place in asked["places"]]
print("made", json.dumps([made, core.blocks.total, core._scheduler.max_num_running_reqs, said[-1]]))
"""


def test_options_reach_the_engine_core(vllm_model_dir, tmp_path):
    """A worker's engine core has every option, and that of the phase in place of the common one."""
    common = tmp_path / "options.yaml"
    options = {name: value for name, (value, _) in OPTIONS.items()}
    common.write_text(json.dumps(options | {"max_num_seqs": 3}))
    settings = {
        "model": str(vllm_model_dir("llama")),
        "dtype": "float32",
        "engine_args": [str(common)],
        "decode_engine_args": ['{"max_num_seqs": 9}'],
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps({"settings": settings, "places": [place for _, place in OPTIONS.values()]}),
        env={**os.environ, **ENGINES["vllm"].environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("made "))
    made, blocks, most, said = json.loads(line.removeprefix("made "))
    for (name, (value, _)), shown in zip(OPTIONS.items(), made, strict=True):
        assert shown == SHOWN.get(name, str(value)), name
    assert (blocks, most) == (49, 9)  # vLLM never uses block 0
    assert re.fullmatch(r"decode-0 loaded \S+ GiB of weights in \d+\.\d s", said)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--engine-args", '{"max_logprob": 5}'), "vLLM's options: unrecognized arguments: --max-logprob=5"),
        (
            ("--", "-dp", "2"),
            "data_parallel_size cannot be 2 in a worker: give --prefill, --decode or --colocated, whose",
        ),
        (("--", "-tp", "2"), "vLLM's option tensor_parallel_size cannot be 2 in a worker: give --tp"),
        (("--tp", "2", "--engine-args", DRAFTS), "speculative_config is not tested with --tp or --pp"),
        (("--pp", "2", "--", "--async-scheduling"), "async_scheduling is not tested with --tp or --pp"),
        (("--", "--quantization", "fp8"), "vLLM cannot serve it: torch.float32 is not supported for quantization"),
    ],
)
def test_wrong_options_end_the_start(flags, reason, vllm_model_dir):
    """The service ends with one sentence before any worker starts."""
    with pytest.raises(ConfigurationError) as ended, served(vllm_model_dir("llama"), (*FLAGS, *flags)):
        pass
    last = str(ended.value).strip().splitlines()[-1]
    assert last.startswith("twofold: ")
    assert reason in last
