"""Results of performance models. mypyc does not support msgspec, so it does not compile this module."""

import msgspec


class ModelAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute relative errors of a performance model on held-out measurements; None if unknown.

    `estimated` is set if the model was not fitted to measurements of this LLM on this machine. The errors are then
    those of the same method for measured LLMs and machines. `basis` briefly describes the underlying data.
    """

    prefill: float | None
    decode: float | None
    basis: str
    estimated: bool = False


class DecodeCost(msgspec.Struct, frozen=True):
    """Seconds of a decode iteration: `base_s + context_s · (KV tokens read by all sequences)`."""

    base_s: float
    context_s: float
