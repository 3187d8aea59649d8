"""The performance model seam: seconds and watts of an iteration of one instance.

A decode iteration is linear in the KV tokens it reads, for a given number of sequences. That is what lets a
simulator sum a run of iterations in closed form, so every model states it as two coefficients.
"""

from typing import Protocol

import msgspec


class ModelError(msgspec.Struct, frozen=True, kw_only=True):
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


class PerformanceModel(Protocol):
    """Times and power of one instance: a model on a machine at one tensor parallelism."""

    @property
    def name(self) -> str:
        """Which model this is and of what, for people: `fitted bloom-176b on dgx-h100 TP8`."""
        ...

    @property
    def error(self) -> ModelError: ...

    def prefill_s(self, tokens: int, squares: int) -> float:
        """Seconds of an iteration of prompts only.

        `tokens` are computed in all; `squares` is Σ((context + tokens)² − context²) over its sequences, which
        is Σ tokens² for whole prompts and adds up to the same for a prompt cut in chunks.
        """
        ...

    def decode_cost(self, sequences: int) -> DecodeCost:
        """The cost of an iteration in which `sequences` sequences make one token each, and nothing else."""
        ...

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """Seconds of an iteration of `tokens` prompt tokens beside `sequences` decodes.

        The decodes read `context` KV tokens in all.
        """
        ...

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """(TTFT, TPOT) in seconds of a request that has the instance to itself."""
        ...

    @property
    def idle_w(self) -> float:
        """Watts of the instance's share of its machine while no batch runs."""
        ...

    def prefill_w(self, tokens: int) -> float:
        """Watts while prompts run, alone or beside decodes."""
        ...

    def decode_w(self, sequences: int) -> float:
        """Watts while a decode iteration runs."""
        ...
