"""Batches: the sequences and tokens that an instance computes in one iteration."""

import msgspec

from twofold.request import Phase


class BatchItem(msgspec.Struct, frozen=True):
    """Tokens of one sequence in an iteration: `num_tokens` new tokens after `context_tokens` tokens in the KV cache."""

    request_id: str
    phase: Phase
    num_tokens: int
    context_tokens: int
    samples: bool  # the item completes the prompt or extends the output, so the engine also samples a token


class Batch(msgspec.Struct, frozen=True):
    """The items that an instance computes in one iteration."""

    id: int  # number of the batch on its instance, from 0
    items: tuple[BatchItem, ...]
