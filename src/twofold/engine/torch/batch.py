"""Packs an iteration into tensors, plans its attention calls, and computes paged attention for transformers models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twofold.engine.base import OnLayer, SequenceStep
from twofold.engine.torch import kernels
from twofold.engine.torch.pool import KvPool, LayerNotifier

# On a CPU a group's keys and values are copied into a buffer and read again by the attention kernel. The second read
# should hit the cache of the core, of 1 or 2 MiB. (16 sequences of 512 tokens: 56 ms a step, 82 ms without a limit.)
_CPU_GROUP_BYTES = 2**20
# On a GPU the limit keeps the buffers small beside the pool.
_DEVICE_GROUP_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class _Span:
    """Range of positions to which a sequence's new tokens attend, and the blocks of this range."""

    first: int
    end: int  # exclusive
    blocks: Sequence[int]
    skip: int  # positions of the first block that come before `first`

    @property
    def length(self) -> int:
        return self.end - self.first

    @property
    def neighbours(self) -> bool:
        return self.blocks[-1] - self.blocks[0] == len(self.blocks) - 1 and list(self.blocks) == list(
            range(self.blocks[0], self.blocks[-1] + 1)
        )


def is_decode(step: SequenceStep) -> bool:
    """Return whether the step computes exactly one token, after cached context."""
    return step.start > 0 and len(step.token_ids) == 1


class AttentionPlanner:
    """Plans the attention calls of all layers that have the same sliding window."""

    def __init__(self, window: int | None, pool: KvPool, scratch: kernels.Scratch) -> None:
        # The window is in tokens, or None for full attention.
        self._window, self._pool, self._scratch = window, pool, scratch
        self._block_size = pool.layout.block_size
        self._block_bytes = pool.layout.layer_bytes_per_block(0)
        on_cpu = pool.device.type == "cpu"
        self._group_bytes = _CPU_GROUP_BYTES * torch.get_num_threads() if on_cpu else _DEVICE_GROUP_BYTES

    def plan(self, steps: Sequence[SequenceStep]) -> list[kernels.BatchPart]:
        """Return the attention calls of a batch. In `steps`, decodes must precede prompts."""
        decodes = [self._span(step) for step in steps if is_decode(step)]
        parts: list[kernels.BatchPart] = list(self._decode_groups(decodes))
        row = len(decodes)
        for step in steps[row:]:
            rows = slice(row, row + len(step.token_ids))
            parts.append(self._prompt(step, rows))
            row = rows.stop
        return parts

    def _span(self, step: SequenceStep) -> _Span:
        end = step.start + len(step.token_ids)
        first = 0 if self._window is None else max(0, step.start + 1 - self._window)
        first_block = first // self._block_size
        blocks = step.block_table[first_block : (end - 1) // self._block_size + 1]
        return _Span(first, end, blocks, first - first_block * self._block_size)

    # -- prompts ----------------------------------------------------------------------------------------------------

    def _prompt(self, step: SequenceStep, rows: slice) -> kernels.BatchPart:
        span = self._span(step)
        if step.start == 0:
            plain = self._window is None or span.end <= self._window
            return kernels.PromptStart(rows, None if plain else self._mask(step, span))
        return kernels.PromptChunk(rows, self._pool, self._context(span), self._mask(step, span))

    def _mask(self, step: SequenceStep, span: _Span) -> Tensor:
        queries, keys = range(step.start, span.end), range(span.first, span.end)
        return kernels.attention_mask(queries, keys, self._window, self._pool.keys(0))

    def _context(self, span: _Span) -> kernels.KvContext:
        if span.neighbours:
            return kernels.ContiguousKv(span.blocks[0] * self._block_size + span.skip, span.length)
        return kernels.GatheredKv(self._pool.index(span.blocks), 1, span.skip, span.length, None, self._scratch)

    # -- decoding ---------------------------------------------------------------------------------------------------

    def _decode_groups(self, spans: Sequence[_Span]) -> Iterator[kernels.BatchPart]:
        start = 0
        while start < len(spans):
            end = self._group_end(spans, start)
            rows = slice(start, end)
            if end - start == 1:
                yield kernels.DecodeGroup(rows, self._pool, self._context(spans[start]), None)
            else:
                yield self._group(rows, spans[start:end])
            start = end

    def _group_end(self, spans: Sequence[_Span], start: int) -> int:
        longest, end = len(spans[start].blocks), start + 1
        while end < len(spans):
            blocks = len(spans[end].blocks)
            longest = max(longest, blocks)
            full = longest * (end + 1 - start) * self._block_bytes > self._group_bytes
            if full or 2 * blocks < longest:
                break
            end += 1
        return end

    def _group(self, rows: slice, spans: Sequence[_Span]) -> kernels.DecodeGroup:
        """Combine several decodes into one attention call."""
        width = max(len(span.blocks) for span in spans)
        # Shorter block lists are padded with their last block.
        table = [block for s in spans for block in (*s.blocks, *([s.blocks[-1]] * (width - len(s.blocks))))]
        column = torch.arange(width * self._block_size, device=self._pool.device)
        ends = self._pool.index([span.skip + span.length for span in spans]).unsqueeze(1)
        skips = self._pool.index([span.skip for span in spans]).unsqueeze(1)
        beyond = column >= ends
        length = max(span.skip + span.length for span in spans)
        mask = kernels.hide((beyond | (column < skips))[:, :length], self._pool.keys(0))[:, None, None]
        padding = beyond.flatten().nonzero().squeeze(1)
        context = kernels.GatheredKv(self._pool.index(table), len(spans), 0, length, padding, self._scratch)
        return kernels.DecodeGroup(rows, self._pool, context, mask)


@dataclass(frozen=True, slots=True)
class LayerHooks:
    """The callbacks `on_layer` and `wait_for` of an iteration (see `Engine.run`)."""

    announcer: LayerNotifier
    on_layer: OnLayer | None = None
    wait_for: OnLayer | None = None

    def written(self, layer: int) -> None:
        """Call the callbacks of a layer whose new KV is written."""
        if self.wait_for is not None:
            self.wait_for(layer)
        if self.on_layer is not None:  # the write may only be queued on the device yet
            self.announcer.after(partial(self.on_layer, layer))


class LogitRows(NamedTuple):
    """Rows of a batch that need logits, and the places in `rows` that belong to each step."""

    rows: Tensor
    sampling: dict[int, int]  # of the last token of each step that samples, by index of the step
    scoring: dict[int, range]  # of the tokens before the scored ones


class PackedBatch:
    """Batch of one engine iteration as packed tensors: first the decode tokens, then the tokens of prompt chunks."""

    def __init__(
        self,
        steps: Sequence[SequenceStep],
        pool: KvPool,
        windows: Sequence[int | None],
        scratch: kernels.Scratch,
        hooks: LayerHooks,
        first_layer: int = 0,
    ) -> None:
        # Indices in `steps` of the packed steps: decodes in order of descending context, then prompts.
        self.order = sorted(range(len(steps)), key=lambda i: _rank(steps[i]))
        self.hooks = hooks
        self.first_layer = first_layer  # index in the whole model of the first layer in the pool
        self._steps = [steps[i] for i in self.order]
        self._pool, self._windows, self._scratch = pool, windows, scratch
        self._parts: dict[int | None, list[kernels.BatchPart]] = {}
        self.token_ids = self._pool.index([t for step in self._steps for t in step.token_ids])
        self.positions = self._pool.index([p for s in self._steps for p in range(s.start, s.start + len(s.token_ids))])
        self._slots = self._pool.index([slot for step in self._steps for slot in self._slots_of(step)])

    def rows(self) -> "LogitRows":
        """Return the rows of the batch that need logits."""
        sampling, scoring = dict[int, int](), dict[int, range]()
        rows: list[int] = []
        end = 0
        for original, step in zip(self.order, self._steps, strict=True):
            start, end = end, end + len(step.token_ids)
            if step.scored_ids:
                scoring[original] = range(len(rows), len(rows) + len(step.scored_ids))
                rows += range(start, start + len(step.scored_ids))
            if step.sampling is not None:
                sampling[original] = len(rows)
                rows.append(end - 1)
        return LogitRows(self._pool.index(rows), sampling, scoring)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's new keys and values to the KV pool. `keys` and `values` are [tokens, kv_heads, dim]."""
        for part, new in ((self._pool.keys(layer), keys), (self._pool.values(layer), values)):
            part.view(-1, part.shape[2], part.shape[3]).index_copy_(0, self._slots, new)

    def parts(self, layer: int) -> list[kernels.BatchPart]:
        """Split the batch into one part for each attention call of layer `layer`; return the parts in token order."""
        window = self._windows[layer]  # layers with the same window share their calls
        if window not in self._parts:
            self._parts[window] = AttentionPlanner(window, self._pool, self._scratch).plan(self._steps)
        return self._parts[window]

    def _slots_of(self, step: SequenceStep) -> list[int]:
        size = self._pool.layout.block_size
        table = step.block_table
        return [table[p // size] * size + p % size for p in range(step.start, step.start + len(step.token_ids))]


def _rank(step: SequenceStep) -> tuple[bool, int]:
    decodes = is_decode(step)
    return not decodes, -step.start if decodes else 0


PAGED = "twofold_paged"  # name of `paged_attention` as an attn_implementation of transformers


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, key_dim]
    key: Tensor,  # [1, kv_heads, tokens, key_dim]
    value: Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: Tensor | None,  # noqa: ARG001  (always None: the batch has the masks)
    *,
    twofold_batch: PackedBatch,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: object,  # the probe refuses models with other arguments that change attention
) -> tuple[Tensor, None]:
    """Write the new keys and values to the KV pool, and compute attention over the whole context."""
    batch = twofold_batch
    layer = int(module.layer_idx) - batch.first_layer  # type: ignore[arg-type]
    batch.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    batch.hooks.written(batch.first_layer + layer)
    call = kernels.AttentionInputs(layer, query, key, value, kernels.AttentionScoring(scaling, softcap, s_aux))
    pieces = [part.attend(call) for part in batch.parts(layer)]
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return packed.unsqueeze(0), None  # [1, tokens, heads, value_dim]
