"""The interface of performance models: seconds and watts of an iteration of one instance.

For a given number of sequences, a decode iteration is linear in the KV tokens it reads. Every model states it as two
coefficients, so that a simulator can sum a run of iterations in closed form.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from twofold.performance.cost import DecodeCost, ModelAccuracy


@dataclass(kw_only=True)
class InstancePower:
    """Watts of one instance. Shares refer to the accelerators' TDP; `twofold.performance.power` has the assumptions."""

    idle_w: float
    overhead_w: float
    accelerators_w: float
    cap: float
    decode_share: float
    sequence_share: float
    saturation_tokens: int

    def prefill_w(self, tokens: int) -> float:
        """Watts while prompts with `tokens` tokens in all run, alone or beside decodes."""
        full = min(tokens / self.saturation_tokens, 1.0)
        return self._watts(self.decode_share + (1.0 - self.decode_share) * full)

    def decode_w(self, sequences: int) -> float:
        """Watts while a decode iteration of `sequences` sequences runs."""
        return self._watts(self.decode_share + self.sequence_share * max(sequences - 1, 0))

    def _watts(self, share: float) -> float:
        return max(self.overhead_w + self.accelerators_w * min(share, self.cap), self.idle_w)


NO_POWER = InstancePower(
    idle_w=0.0, overhead_w=0.0, accelerators_w=0.0, cap=1.0, decode_share=0.0, sequence_share=0.0, saturation_tokens=1
)


@mypyc_attr(allow_interpreted_subclasses=True)
class PerformanceModel(ABC):
    """Times and power of one instance: a model on machines at one tensor and pipeline parallelism.

    `name` is for display, such as `fitted bloom-176b on dgx-h100 TP8`. In a pipeline, an iteration passes all `stages`
    one after the other, and the times are those of the whole iteration. `power` computes the watts: an `InstancePower`,
    or another model with the same power.
    """

    name: str
    error: ModelAccuracy
    power: "InstancePower | PerformanceModel"
    stages: int = 1

    @property
    def first_stage(self) -> "PerformanceModel":
        """Times and power of the first stage alone."""
        return self

    @property
    def later_stage(self) -> "PerformanceModel":
        """Times and power of each later stage alone, including the transfer of activations to it."""
        return self

    @abstractmethod
    def prefill_s(self, tokens: int, squares: int) -> float:
        """Seconds of an iteration of prompts only.

        `tokens` is the number of computed tokens. `squares` is Σ((context + tokens)² − context²) over the sequences:
        Σ tokens² for whole prompts, and the same sum for a prompt cut into chunks.
        """

    @abstractmethod
    def decode_cost(self, sequences: int) -> DecodeCost:
        """Cost of an iteration in which `sequences` sequences decode one token each."""

    @abstractmethod
    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """Seconds of an iteration of `tokens` prompt tokens and `sequences` decodes with `context` KV tokens in all."""

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """(TTFT, TPOT) in seconds of a request that runs alone: one prefill, then decodes of one sequence.

        Prefill produces the first token. The decode of token i + 1 reads the prompt and the i tokens before it, so over
        i = 1 … n − 1 the mean context is prompt + n/2. With one output token, TPOT is the time of the first decode that
        would follow.
        """
        cost = self.decode_cost(1)
        context = prompt_tokens + max(output_tokens, 2) / 2
        ttft_s = self.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
        return ttft_s, cost.base_s + cost.context_s * context

    @property
    def idle_w(self) -> float:
        """Watts of the instance's share of its machine between batches."""
        return self.power.idle_w

    def prefill_w(self, tokens: int) -> float:
        """Watts while prompts run, alone or beside decodes."""
        return self.power.prefill_w(tokens)

    def decode_w(self, sequences: int) -> float:
        """Watts while a decode iteration runs."""
        return self.power.decode_w(sequences)
