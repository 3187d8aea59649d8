"""Batches: the sequences and tokens that an instance computes in one iteration."""

import msgspec

from twofold.request import Phase


class BatchItem(msgspec.Struct, frozen=True):
    """Tokens of one sequence in an iteration: `num_tokens` new tokens after `context_tokens` tokens in the KV cache.
    With `samples`, the engine also samples a token, because the item completes the prompt or extends the output.
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
