"""Result types of performance models: held-out accuracy, measured sizes, and time of a decode iteration."""

import msgspec  # mypyc does not support it, so this module is not compiled


class MeasuredSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Largest sizes that a performance model was fitted to."""

    prompt_tokens: int
    sequences: int  # of a decode iteration


class ModelAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute relative errors of a performance model on held-out measurements; None if unknown."""

    prefill: float | None
    decode: float | None
    basis: str  # the underlying data
    estimated: bool = False  # the errors are those of the same method on other LLMs and machines
    measured: MeasuredSizes | None = None  # None: unknown, or no measurements of this LLM on this machine


class DecodeCost(msgspec.Struct, frozen=True):
    """Seconds of a decode iteration: `base_s + context_s · (KV tokens read by all sequences)`."""

    base_s: float
    context_s: float
