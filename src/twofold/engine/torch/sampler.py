"""Sampling of tokens from logits. A request gets the same tokens in any batch and any process."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from twofold.engine.base import Sampled
from twofold.engine.torch.logits import SamplingRow, adjusted, adjusts
from twofold.request import SamplingParams, TokenScore

# Nucleus sampling tries this many best tokens before it sorts the whole vocabulary.
_LIKELY = 256
_SCORED = 256  # rows of logits in float32 at once
# Below this temperature noise has no effect, and the division would overflow.
_COLDEST = 1e-6


def sample(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> list[Sampled]:
    """Sample a token, with log probabilities if requested, for each row of `logits` [rows, vocabulary]."""
    picked = pick(logits, rows, eos_token_ids)
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return [Sampled(token) for token in picked]
    # The model's own log probabilities, without temperature, penalties and excluded tokens.
    counts = [rows[i].sampling.logprobs or 0 for i in wanted]
    scores = token_scores(logits[wanted], [picked[i] for i in wanted], max(counts))
    scored = {
        i: Sampled(picked[i], score.logprob, score.top_logprobs[:count])
        for i, score, count in zip(wanted, scores, counts, strict=True)
    }
    return [scored.get(i) or Sampled(token) for i, token in enumerate(picked)]


def pick(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> list[int]:
    """Sample a token id for each row of `logits`, without log probabilities."""
    changed = {i: adjusted(logits[i], row, eos_token_ids) for i, row in enumerate(rows) if adjusts(row)}
    if changed:
        logits = logits.to(torch.float32, copy=True)
        logits[list(changed)] = torch.stack(list(changed.values()))
    picked: list[int] = logits.argmax(dim=-1).tolist()
    for i, row in enumerate(rows):
        if not row.sampling.greedy:
            picked[i] = _draw(logits[i], row)
    return picked


def _draw(logits: Tensor, row: SamplingRow) -> int:
    """Sample a token with temperature, min_p, top_k and top_p, by the Gumbel-max trick."""
    sampling = row.sampling
    numbers = logits.float()
    scores = (numbers - numbers.max()) / max(sampling.temperature, _COLDEST)
    if sampling.min_p > 0.0:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), float("-inf"))  # the highest score is 0
    noise = _gumbel(sampling.seed, row.position, len(scores)).to(scores.device)
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return int((scores + noise).argmax())
    # Rounding differences between batch shapes change an argmax only if two tokens are nearly tied.
    kept = _kept(scores, sampling)
    return int(kept[(scores[kept] + noise[kept]).argmax()])


def _kept(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the ids of the tokens that pass top_k and top_p, in order of descending score."""
    vocabulary = len(scores)
    if sampling.top_k > 0:
        best, ids = scores.topk(min(sampling.top_k, vocabulary))
        return ids[: _nucleus(best, best.logsumexp(0), sampling.top_p)]
    total = scores.logsumexp(0)
    best, ids = scores.topk(min(_LIKELY, vocabulary))
    count = _nucleus(best, total, sampling.top_p)
    if count == len(best):
        best, ids = scores.sort(descending=True)
        count = _nucleus(best, total, sampling.top_p)
    return ids[:count]


def _nucleus(best: Tensor, total: Tensor, top_p: float) -> int:
    """Return how many of the highest scores reach a total probability of `top_p`."""
    if top_p >= 1.0:
        return len(best)
    reached = torch.exp(best - total).cumsum(0)
    return min(len(best), 1 + int((reached < top_p).sum()))


def _gumbel(seed: int, position: int, count: int) -> Tensor:
    """Return `count` values of standard Gumbel noise, which depend only on the seed and the position."""
    # Raw Philox bits are the same on every platform and in every numpy release.
    bits = np.random.Philox(key=seed % 2**64, counter=position << 128).random_raw(count)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(-np.log(-np.log(uniform))).float()


def token_scores(logits: Tensor, token_ids: Sequence[int], top: int) -> Iterator[TokenScore]:
    """Yield the log probability of each token in its row of `logits` [tokens, vocabulary], and the `top` highest."""
    for start in range(0, len(token_ids), _SCORED):  # the float32 copy of a long prompt's logits would be large
        tokens = list(token_ids[start : start + _SCORED])
        logprobs = torch.log_softmax(logits[start : start + len(tokens)].float(), dim=-1)
        chosen: list[float] = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        best, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        for logprob, row_ids, row_best in zip(chosen, ids.tolist(), best.tolist(), strict=True):
            yield TokenScore(logprob, tuple(zip(row_ids, row_best, strict=True)))
