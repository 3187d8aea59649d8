"""The performance model seam: seconds and watts of an iteration of one instance.

A decode iteration is linear in the KV tokens it reads, for a given number of sequences. That is what lets a
simulator sum a run of iterations in closed form, so every model states it as two coefficients.

A request that has an instance to itself: what slow-downs are measured against.
"""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from twofold.performance.cost import DecodeCost, ModelAccuracy


@mypyc_attr(allow_interpreted_subclasses=True)
class PerformanceModel(ABC):
    """Times and power of one instance: a model on machines at one tensor and pipeline parallelism.

    `name` says for people which model this is and of what: `fitted bloom-176b on dgx-h100 TP8`. Where an instance is
    a pipeline an iteration passes its `stages` one after the other, and the times are those of the whole iteration.
    """

    name: str
    error: ModelAccuracy

    @property
    def stages(self) -> int:
        """Pipeline parallelism."""
        return 1

    @property
    def first_stage(self) -> "PerformanceModel":
        """Times and power of the first stage alone."""
        return self

    @property
    def later_stage(self) -> "PerformanceModel":
        """Times and power of each of the other stages alone, with what it takes to be sent activations."""
        return self

    @abstractmethod
    def prefill_s(self, tokens: int, squares: int) -> float:
        """Seconds of an iteration of prompts only.

        `tokens` are computed in all; `squares` is Σ((context + tokens)² − context²) over its sequences, which
        is Σ tokens² for whole prompts and adds up to the same for a prompt cut in chunks.
        """
        ...

    @abstractmethod
    def decode_cost(self, sequences: int) -> DecodeCost:
        """The cost of an iteration in which `sequences` sequences make one token each, and nothing else."""
        ...

    @abstractmethod
    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """Seconds of an iteration of `tokens` prompt tokens beside `sequences` decodes.

        The decodes read `context` KV tokens in all.
        """
        ...

    @abstractmethod
    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """(TTFT, TPOT) in seconds of a request that has the instance to itself."""
        ...

    @property
    @abstractmethod
    def idle_w(self) -> float:
        """Watts of the instance's share of its machine while no batch runs."""
        ...

    @abstractmethod
    def prefill_w(self, tokens: int) -> float:
        """Watts while prompts run, alone or beside decodes."""
        ...

    @abstractmethod
    def decode_w(self, sequences: int) -> float:
        """Watts while a decode iteration runs."""
        ...


def uncontended_latency(
    model: PerformanceModel, prompt_tokens: int, output_tokens: int
) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds: one prefill of the whole prompt, then decodes of one sequence.

    Prefill makes the first token. The decode that makes token i + 1 reads the prompt and the i tokens before
    it, so over i = 1 … n − 1 the mean context is prompt + n/2. With one output token there is no decode: TPOT
    is then what the first one would have taken.
    """
    cost = model.decode_cost(1)
    context = prompt_tokens + max(output_tokens, 2) / 2
    ttft_s = model.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
    return ttft_s, cost.base_s + cost.context_s * context
