"""Results of performance models. This module is not compiled by mypyc, because mypyc does not support msgspec."""

import msgspec


class ModelAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute relative errors of a performance model on held-out measurements; None if unknown.

    If `estimated` is set, the model was not fitted to this LLM and machine, and the errors are those of the same method
    on other LLMs and machines. `basis` briefly describes the underlying data.
    """

    prefill: float | None
    decode: float | None
    basis: str
    estimated: bool = False


class DecodeCost(msgspec.Struct, frozen=True):
    """Seconds of a decode iteration: `base_s + context_s · (KV tokens read by all sequences)`."""

    base_s: float
    context_s: float
