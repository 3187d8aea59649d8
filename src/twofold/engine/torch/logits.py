"""Changes to the logits of a request before sampling: bias, penalties, and excluded tokens."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from twofold.engine.grammar import allowed_tokens
from twofold.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The sampling parameters of one row of logits."""

    sampling: SamplingParams
    position: int  # of the new token in the sequence, counted from 0
    output_index: int  # of the new token in the output of this attempt, counted from 0
    history: Sequence[int] = ()  # all tokens before the new one, if `sampling.needs_history`
    allowed: bytes | None = None  # of a constrained request: a bit for each token, see `GrammarMatchers.allowed`

    @property
    def output(self) -> Sequence[int]:
        """The output tokens before the new one, including those of earlier attempts."""
        return self.history[self.position - self.output_index - self.sampling.resumed_tokens :]


def adjusts(row: SamplingRow) -> bool:
    """Return whether `adjusted` changes the logits of a row."""
    sampling = row.sampling
    return sampling.needs_history or bool(sampling.logit_bias) or row.output_index < sampling.min_tokens


def adjusted(logits: Tensor, row: SamplingRow, eos_token_ids: Sequence[int]) -> Tensor:
    """Return a copy of a row of logits, [vocabulary] in float32, changed as its sampling asks, in vLLM's order."""
    changed = logits.to(torch.float32, copy=True)
    for token_id, bias in row.sampling.logit_bias:
        changed[token_id] += bias
    _penalize(changed, row)
    if row.allowed is not None:
        refused = torch.from_numpy(~allowed_tokens(row.allowed, len(changed))).to(changed.device)
        changed[refused] = float("-inf")
    sampling, bad = row.sampling, list(_bad_ends(row))
    excluded = [_index(changed, bad)] if bad else []
    if row.output_index < sampling.min_tokens:
        eos = () if sampling.ignore_eos else tuple(eos_token_ids)
        excluded.append(_ends(sampling.stop_token_ids, eos, changed.device))
    if any(map(len, excluded)):
        rest = changed
        for token_ids in excluded:
            rest = rest.index_fill(0, token_ids, float("-inf"))
        if rest.max() > float("-inf"):  # otherwise, the constraint allows only excluded tokens
            return rest
    return changed


def _penalize(logits: Tensor, row: SamplingRow) -> None:
    """Apply the penalties: repetition to tokens of prompt and output, the others to tokens of the output alone."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = _index(logits, set(row.history))
        scores, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(row.output)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[_index(logits, counts)] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _index(logits: Tensor, token_ids: Iterable[int]) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)


@lru_cache(maxsize=256)
def _ends(stop_token_ids: tuple[int, ...], eos_token_ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the token ids that must not be sampled before `min_tokens` output tokens, once for all tokens."""
    return torch.tensor([*stop_token_ids, *eos_token_ids], dtype=torch.int64, device=device)


def _bad_ends(row: SamplingRow) -> Iterator[int]:
    """Yield the last token of each bad word, if the output ends with its other tokens."""
    output = row.output
    for *before, last in row.sampling.bad_word_ids:
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            yield last
