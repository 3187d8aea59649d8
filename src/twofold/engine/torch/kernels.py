"""Attention over paged KV: read the context of sequences from the pool, and compute scores and outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twofold.engine.torch.pool import KvPool

# Query rows computed at once without the fused kernel; bounds the memory for scores of long prompts.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class AttentionScoring:
    """Parameters of a layer's attention scores: scale factor, softcap and attention sinks."""

    scaling: float | None = None  # factor on the dot products; None: 1/√dim
    softcap: float | None = None  # limits scores to ±softcap by tanh (Gemma 2)
    sinks: Tensor | None = None  # [heads]: one extra softmax score per head, without a value vector (gpt-oss)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scoring: AttentionScoring, mask: Tensor | None, *, causal: bool = False
) -> Tensor:
    """Compute attention and return a tensor of shape [b, heads, n, v].

    `query` has shape [b, heads, n, d], `key` [b, kv_heads, c, d] and `value` [b, kv_heads, c, v]. The letters stand
    for batch size b, query length n, context length c, and head sizes d and v. `mask` is added to the scores.
    """
    # `mask` broadcasts to [b, 1, n, c]. `causal` requires n = c and no mask.
    if scoring.softcap is not None or scoring.sinks is not None:
        own = range(query.shape[2])
        return _unfused(query, key, value, scoring, attention_mask(own, own, None, query) if causal else mask)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.shape[2] == 1:
        # One query per sequence: the heads that share a key head are the rows of one product.
        rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        mixed = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scoring.scaling)
        return mixed.reshape(query.shape[0], query.shape[1], 1, -1)
    if grouped and mask is not None and query.is_cuda:
        # The fused CUDA kernels support a mask or grouped heads, not both; the fallback would store all scores.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scaling, enable_gqa=grouped
    )


def attention_mask(queries: range, keys: range, window: int | None, like: Tensor) -> Tensor:
    """Return the mask of queries that attend to keys before them, within a sliding window if there is one.

    It has the shape [1, 1, queries, keys], the dtype and device of `like`, and −inf at the masked positions.
    """
    rows = torch.arange(queries.start, queries.stop, device=like.device).unsqueeze(1)
    columns = torch.arange(keys.start, keys.stop, device=like.device)
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    return hide(hidden, like)[None, None]


def hide(hidden: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the dtype of `like`, with −inf where `hidden` is true and 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=like.dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _unfused(query: Tensor, key: Tensor, value: Tensor, scoring: AttentionScoring, mask: Tensor | None) -> Tensor:
    """Compute attention without the fused kernel, which supports neither softcap nor sinks."""
    rows = query.shape[2]
    pieces = []
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, min(start + _ROWS_AT_ONCE, rows))
        part_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., part, :]
        pieces.append(_attend_rows(query[:, :, part], key, value, scoring, part_mask))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, scoring: AttentionScoring, mask: Tensor | None) -> Tensor:
    batch, heads, rows, dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    # The queries that share a key head become rows of one product, so that keys need not be repeated.
    shared = query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    scores = torch.matmul(shared, key.transpose(-1, -2)).view(batch, heads, rows, columns)
    scores = scores.float() * (dim**-0.5 if scoring.scaling is None else scoring.scaling)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    weights = _softmax(scores, scoring.sinks).to(value.dtype)
    mixed = torch.matmul(weights.view(batch, kv_heads, -1, columns), value)
    return mixed.view(batch, heads, rows, value.shape[-1])


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    batch, heads, rows, columns = scores.shape
    column = sinks.float().view(1, heads, 1, 1).expand(batch, heads, rows, 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :columns]


class Scratch:
    """Reusable buffers for gathered keys and values."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}  # for all layers and batches, because new buffers cause page faults

    def take(self, name: str, like: Tensor, rows: int, columns: int) -> Tensor:
        """Return a buffer [rows, columns] with the dtype of `like`, valid until the next call with the same `name`."""
        count = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != like.dtype:
            buffer = self._buffers[name] = torch.empty(count, dtype=like.dtype, device=like.device)
        return buffer[:count].view(rows, columns)


@dataclass(frozen=True, slots=True)
class ContiguousKv:
    """KV of one sequence in contiguous blocks, which is read without a copy."""

    first_slot: int
    length: int

    def read(self, part: Tensor, name: str) -> Tensor:
        """Return the keys or the values of the sequence as [1, kv_heads, positions, dim]."""
        # `part` has all keys or all values of a layer, [num_blocks, block_size, kv_heads, dim].
        slots = part.view(-1, part.shape[2], part.shape[3])
        return slots[self.first_slot : self.first_slot + self.length].transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class GatheredKv:
    """KV of sequences in scattered blocks, which are copied into a contiguous buffer to be read."""

    blocks: Tensor  # block ids of one sequence after another, padded to equally many
    sequences: int
    first: int  # first position to read of each sequence
    length: int  # number of positions to read of each sequence
    padding: Tensor | None  # padded positions of the buffer, set to 0 because unused memory may contain NaN
    scratch: Scratch

    def read(self, part: Tensor, name: str) -> Tensor:
        kv_heads, dim = part.shape[2:]
        rows = part.view(part.shape[0], -1)
        # The buffer, and so the result, is valid until the next read with the same name.
        out = self.scratch.take(name, part, len(self.blocks), rows.shape[1])
        torch.index_select(rows, 0, self.blocks, out=out)
        if self.padding is not None:
            out.view(-1, kv_heads * dim).index_fill_(0, self.padding, 0)
        gathered = out.view(self.sequences, -1, kv_heads, dim)
        return gathered[:, self.first : self.first + self.length].transpose(1, 2)


KvContext = ContiguousKv | GatheredKv


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of one layer's attention for all tokens of a batch."""

    layer: int
    query: Tensor  # [1, heads, tokens, key_dim]
    key: Tensor  # [1, kv_heads, tokens, key_dim]
    value: Tensor  # [1, kv_heads, tokens, value_dim]
    scoring: AttentionScoring


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Attention call for one or more decodes, with one new token each."""

    rows: slice
    pool: KvPool
    context: KvContext
    mask: Tensor | None

    def attend(self, call: AttentionInputs) -> Tensor:
        """Return the attention output [tokens, heads, value_dim]."""
        # The pool already has the keys and values of the new tokens.
        keys = self.context.read(self.pool.keys(call.layer), "keys")
        values = self.context.read(self.pool.values(call.layer), "values")
        tokens = call.query[0, :, self.rows].transpose(0, 1).unsqueeze(2)
        return attend(tokens, keys, values, call.scoring, self.mask).squeeze(2)


@dataclass(frozen=True, slots=True)
class PromptStart:
    """Attention call for the first chunk of a prompt. Tokens of the chunk attend only to tokens of the chunk."""

    rows: slice
    mask: Tensor | None

    def attend(self, call: AttentionInputs) -> Tensor:
        query, key, value = (states[:, :, self.rows] for states in (call.query, call.key, call.value))
        mixed = attend(query, key, value, call.scoring, self.mask, causal=self.mask is None)
        return mixed[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Attention call for a later chunk of a prompt, whose tokens also attend to cached KV."""

    rows: slice
    pool: KvPool
    context: KvContext
    mask: Tensor

    def attend(self, call: AttentionInputs) -> Tensor:
        keys = self.context.read(self.pool.keys(call.layer), "keys")
        values = self.context.read(self.pool.values(call.layer), "values")
        return attend(call.query[:, :, self.rows], keys, values, call.scoring, self.mask)[0].transpose(0, 1)


BatchPart = DecodeGroup | PromptStart | PromptChunk  # consecutive tokens that share one attention call
