"""Characterization of vLLM's engine in this process."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twofold.characterize.local import Stepper
from twofold.characterize.target import TargetLimits

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from twofold.engine.vllm.options import model_errors


class VllmStepper(Stepper):
    """vLLM engine that the caller runs iteration by iteration, without prefix caching."""

    def __init__(
        self,
        model: Path,
        *,
        device: str,
        threads: int | None,
        tensor_parallel: int,
        kv_cache_bytes: int,
        **options: Any,  # noqa: ANN401  (engine arguments, which vLLM checks)
    ) -> None:
        """Load the model. Raises ModelError if vLLM cannot serve the model."""
        if threads is not None:
            torch.set_num_threads(threads)
        args = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            tensor_parallel_size=tensor_parallel,
            kv_cache_memory_bytes=kv_cache_bytes,
            enforce_eager=torch.device(device).type == "cpu",
            **options,
        )
        with model_errors(str(model)):
            self._engine = LLMEngine.from_engine_args(args)
        config = self._engine.vllm_config
        cache = config.cache_config
        self.engine = f"vLLM {vllm.__version__}"
        self.vocab_size = int(config.model_config.get_vocab_size())
        self.limits = TargetLimits(
            max_model_len=int(config.model_config.max_model_len),
            max_num_seqs=int(config.scheduler_config.max_num_seqs),
            max_num_batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
            kv_capacity_tokens=int(cache.num_gpu_blocks) * int(cache.block_size),
        )

    def add(self, name: str, token_ids: list[int], output_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": token_ids}, sampling)

    def step(self) -> Iterable[str]:
        return [
            output.request_id
            for output in self._engine.step()
            for completion in output.outputs
            for _ in completion.token_ids
        ]
