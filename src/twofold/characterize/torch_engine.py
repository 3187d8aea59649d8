"""Characterization of the built-in torch engine in this process."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch

from twofold import __version__
from twofold.characterize.local import Stepper
from twofold.characterize.target import TargetLimits
from twofold.engine.base import SequenceStep
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import load_model
from twofold.engine.torch.pool import KvPool
from twofold.errors import require
from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import Request, SamplingParams
from twofold.scheduling.batchers import create_batcher
from twofold.scheduling.instance.scheduler import InstanceScheduler

_BLOCK_SIZE = 16


class TorchStepper(Stepper):
    """Torch engine that runs one iteration per step, with chunked prefill and without prefix reuse."""

    def __init__(
        self,
        model: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        threads: int | None = None,
        kv_cache_bytes: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int | None = None,
    ) -> None:
        """Load the model. Raises ModelError if it is unusable, ConfigurationError if the KV cache is too small."""
        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load_model(model, dtype=dtype).to(device)
        layout = loaded.layout(_BLOCK_SIZE)
        num_blocks = kv_cache_bytes // layout.bytes_per_block
        context = min(max_model_len or loaded.max_model_len, loaded.max_model_len, num_blocks * _BLOCK_SIZE)
        require(context > _BLOCK_SIZE, f"a KV cache of {kv_cache_bytes:,} bytes holds no request: give it more memory")
        self.engine = f"twofold {__version__}"
        self.vocab_size = loaded.vocab_size
        self.limits = TargetLimits(
            max_model_len=context,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_capacity_tokens=num_blocks * _BLOCK_SIZE,
        )
        self._engine = TorchEngine(loaded, KvPool(layout, num_blocks, device=device))
        blocks = PagedBlockAllocator(num_blocks, _BLOCK_SIZE)
        batcher = create_batcher("chunked-prefill", max_num_batched_tokens, max_num_seqs)
        self._scheduler = InstanceScheduler(batcher, blocks, LeaseTable(blocks, "here", 0, 1.0), max_num_seqs)
        self._tokens: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}

    def add(self, name: str, token_ids: list[int], output_tokens: int) -> None:
        self._tokens[name], self._prompts[name] = list(token_ids), len(token_ids)
        request = Request(id=name, arrival_s=0.0, prompt_tokens=len(token_ids), output_tokens=output_tokens)
        self._scheduler.submit(request, decodes_here=True)

    def step(self) -> Iterable[str]:
        batch = self._scheduler.next_batch(time.monotonic())
        if batch is None:
            return ()
        steps = []
        for item in batch.items:
            tokens, start = self._tokens[item.request_id], item.context_tokens
            steps.append(
                SequenceStep(
                    request_id=item.request_id,
                    token_ids=tokens[start : start + item.num_tokens],
                    start=start,
                    block_table=tuple(self._scheduler.blocks_of(item.request_id)),
                    sampling=SamplingParams(max_tokens=1, temperature=0.0) if item.samples else None,
                    output_index=len(tokens) - self._prompts[item.request_id],
                )
            )
        sampled = self._engine.run(steps)
        names = [item.request_id for item, one in zip(batch.items, sampled, strict=True) if one is not None]
        for item, one in zip(batch.items, sampled, strict=True):
            if one is not None:
                self._tokens[item.request_id].append(one.token_id)
        for result in self._scheduler.complete(batch):
            if result.finish_reason is not None:
                del self._tokens[result.request_id], self._prompts[result.request_id]
        return names
