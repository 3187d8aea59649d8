"""The torch engine: runs iterations of a transformers model over a paged KV cache."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch

from twofold.engine.base import NO_TOKEN, OnLayer, Sampled, SequenceStep
from twofold.engine.grammar import GrammarError, GrammarMatchers
from twofold.engine.torch.batch import LayerHooks, PackedBatch
from twofold.engine.torch.kernels import Scratch
from twofold.engine.torch.loader import LoadedModel
from twofold.engine.torch.logits import SamplingRow
from twofold.engine.torch.pool import KvPool, LayerNotifier, copy_blocks
from twofold.engine.torch.sampler import sample, token_scores


# Batching and chunking change results only by rounding: greedy output is identical in float32, but may differ in
# bfloat16 where two tokens are almost equally likely. On an accelerator, `on_layer` is called from another thread.
class TorchEngine:
    """Engine that runs a Hugging Face transformers model with a paged KV cache on one device."""

    def __init__(self, model: LoadedModel, pool: KvPool, grammars: GrammarMatchers | None = None) -> None:
        # `grammars` follows constrained requests; without it, they fail.
        if model.layout(pool.layout.block_size) != pool.layout:
            raise ValueError("the layout of the pool is that of another model")
        self._loaded, self._model, self._pool = model, model.model, pool
        self.layout, self.num_blocks = pool.layout, pool.num_blocks
        self.samples = model.samples  # False: this rank does not sample, and its results are all None
        self._grammars = grammars
        self._scratch = Scratch()
        self._announcer = LayerNotifier(pool.device)
        if pool.device.type == "cuda":
            # cuDNN builds a plan for every new shape, which takes 40 ms on an H200. Contexts grow with every token.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._keeps_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters

    def run(
        self, steps: Sequence[SequenceStep], on_layer: OnLayer | None = None, wait_for: OnLayer | None = None
    ) -> list[Sampled | None]:
        results: list[Sampled | None] = [None] * len(steps)
        if not steps:
            return results
        try:
            self._run(steps, results, LayerHooks(self._announcer, on_layer, wait_for))
        except torch.AcceleratorError as error:
            # The device is unusable in this process.
            raise SystemExit(f"the device has failed: {error}") from error
        return results

    def _run(self, steps: Sequence[SequenceStep], results: list[Sampled | None], hooks: LayerHooks) -> None:
        with torch.inference_mode():
            self._copy(steps)
            batch = PackedBatch(steps, self._pool, self._loaded.windows, self._scratch, hooks, self._loaded.first_layer)
            needed = batch.rows()
            logits = self._forward(batch, needed.rows)
            if self.samples:
                for i, places in needed.scoring.items():
                    scores = token_scores(logits[places.start : places.stop], steps[i].scored_ids, steps[i].top)
                    results[i] = Sampled(NO_TOKEN, prompt_scores=tuple(scores))
                if needed.sampling:
                    self._sample(steps, needed.sampling, logits, results)
        self._announcer.finish()

    def _sample(
        self, steps: Sequence[SequenceStep], places: dict[int, int], logits: torch.Tensor, results: list[Sampled | None]
    ) -> None:
        """Sample a token for the steps in `places`, which has their rows of logits, and add it to their results."""
        rows: dict[int, SamplingRow] = {}
        for i in places:
            try:
                rows[i] = self._row(steps[i])
            except GrammarError as error:  # the other requests of the batch go on
                results[i] = Sampled(NO_TOKEN, error=f"the output cannot be constrained: {error}")
        own = [places[i] for i in rows]
        chosen = logits if len(own) == len(logits) else logits[own]
        picked = sample(chosen, list(rows.values()), self._loaded.eos_token_ids)
        for i, result in zip(rows, picked, strict=True):
            before = results[i]
            results[i] = result if before is None else replace(result, prompt_scores=before.prompt_scores)

    def _row(self, step: SequenceStep) -> SamplingRow:
        sampling = step.sampling
        assert sampling is not None  # noqa: S101  (for the type checker: this step samples)
        row = SamplingRow(sampling, step.start + len(step.token_ids), step.output_index, step.history)
        if sampling.constraint is None:
            return row
        if self._grammars is None:
            raise GrammarError("this worker has no tokenizer")
        allowed = self._grammars.allowed(step.request_id, sampling.constraint, row.output)
        return replace(row, allowed=allowed)

    def _copy(self, steps: Sequence[SequenceStep]) -> None:
        """Copy shared blocks before sequences write to them (copy on write)."""
        copies = [copy for step in steps for copy in step.copies]
        if copies:
            sources, targets = [source for source, _ in copies], [target for _, target in copies]
            copy_blocks(self._pool, self._pool.layers, sources, self._pool, targets)

    def _forward(self, batch: PackedBatch, rows: torch.Tensor) -> torch.Tensor:
        """Run the model, and return the logits of the batch tokens at the indices `rows`."""
        options = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self._model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            twofold_batch=batch,
            **options,
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]
