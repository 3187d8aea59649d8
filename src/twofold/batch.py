"""Batches: the work of one iteration of one instance."""

import msgspec

from twofold.request import Phase


class BatchItem(msgspec.Struct, frozen=True):
    """The part of one sequence in an iteration.

    `num_tokens` tokens are computed after `context_tokens` cached ones. `samples` is true if the item
    completes the prompt or extends the output, so that a token is sampled.
    """

    request_id: str
    phase: Phase
    num_tokens: int
    context_tokens: int
    samples: bool


class Batch(msgspec.Struct, frozen=True):
    """The items of one iteration in order; `id` counts the batches of an instance from 0."""

    id: int
    items: tuple[BatchItem, ...]
