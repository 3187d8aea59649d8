"""Attention of queries to given keys and values: torch's fused one where it can, written out where it cannot."""

from dataclasses import dataclass

import torch
from torch.nn import functional

# Rows of scores computed at once where they are written out: bounds the memory of a long prompt.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores keys beyond the plain dot product.

    `scaling` multiplies the dot products (None: 1/√dim). `softcap` bounds scores to ±softcap by tanh (Gemma 2).
    `sinks` [heads] is one more score per head that takes its share of the softmax and adds nothing (gpt-oss).
    """

    scaling: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    mask: torch.Tensor | None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """query [b, heads, n, d], key [b, kv_heads, c, d], value [b, kv_heads, c, v] → [b, heads, n, v].

    `mask` is added to the scores and broadcasts to [b, 1, n, c]; `causal` is for n = c and no mask.
    """
    if scoring.softcap is not None or scoring.sinks is not None:
        return _written_out(query, key, value, scoring, _causal_mask(query) if causal else mask)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.shape[2] == 1:
        # One query per sequence: those that share a key head are the rows of one product.
        rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        mixed = functional.scaled_dot_product_attention(
            rows, key, value, attn_mask=mask, scale=scoring.scaling
        )
        return mixed.reshape(query.shape[0], query.shape[1], 1, -1)
    if grouped and mask is not None and query.is_cuda:
        # The fused CUDA kernels take a mask or grouped heads, not both; the fallback would hold all scores.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scaling, enable_gqa=grouped
    )


def _causal_mask(query: torch.Tensor) -> torch.Tensor:
    n = query.shape[2]
    return torch.full((n, n), float("-inf"), dtype=query.dtype, device=query.device).triu(1)


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None
) -> torch.Tensor:
    """The same in single steps, a bounded number of query rows at a time."""
    rows = query.shape[2]
    pieces = []
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, min(start + _ROWS_AT_ONCE, rows))
        part_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., part, :]
        pieces.append(_attend_rows(query[:, :, part], key, value, scoring, part_mask))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None
) -> torch.Tensor:
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


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    batch, heads, rows, columns = scores.shape
    column = sinks.float().view(1, heads, 1, 1).expand(batch, heads, rows, 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :columns]
