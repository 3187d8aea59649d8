"""Values that performance models return. These structs are not compiled: mypyc does not support msgspec."""

import msgspec


class ModelAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute relative errors of a model against held-out measurements; None if unknown.

    `estimated` marks a pair of model and machine without measurements: the errors then come from the same method on
    measured pairs. `basis` is a short description of the underlying data.
    """

    prefill: float | None
    decode: float | None
    basis: str
    estimated: bool = False


class DecodeCost(msgspec.Struct, frozen=True):
    """Seconds of a decode iteration: `base_s + context_s · (KV tokens read by all sequences)`."""

    base_s: float
    context_s: float
