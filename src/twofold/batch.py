"""Batches: the sequences and tokens that an instance computes in one iteration."""

import msgspec

from twofold.request import Phase


class BatchItem(msgspec.Struct, frozen=True):
    """The tokens of one sequence that an iteration computes.

    The `num_tokens` tokens follow `context_tokens` tokens in the KV cache. `samples` is true if the item
    completes the prompt or extends the output, so that the engine samples a token.
    """

    request_id: str
    phase: Phase
    num_tokens: int
    context_tokens: int
    samples: bool


class Batch(msgspec.Struct, frozen=True):
    """The items that one iteration computes, in order. `id` numbers the batches of an instance from 0."""

    id: int
    items: tuple[BatchItem, ...]
