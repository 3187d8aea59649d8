"""What a performance model says of itself and of decodes. Not compiled, as all structs of msgspec: it would lose what
makes them one."""

import msgspec


class ModelAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """How far a model was from measurements it had not seen: mean absolute relative errors.

    `estimated` says that nobody measured this pair of model and machine: the errors are then those of the same
    method on pairs that were measured. `basis` says in a few words what the model rests on. An error is None
    where it is unknown.
    """

    prefill: float | None
    decode: float | None
    basis: str
    estimated: bool = False


class DecodeCost(msgspec.Struct, frozen=True):
    """Seconds of a decode iteration: `base_s + context_s · (KV tokens read by all its sequences)`."""

    base_s: float
    context_s: float
