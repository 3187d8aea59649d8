"""Interface of performance models, which predict the time and power of an instance's iterations.

The time of a decode iteration is linear in the KV tokens read, so that simulators can sum many iterations at once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from twofold.performance.cost import DecodeCost, ModelAccuracy


@dataclass(kw_only=True)
class InstancePower:
    """Power of an instance in watts (see `performance.power`). `cap` and the `_share` fields are fractions of TDP."""

    idle_w: float
    overhead_w: float
    accelerators_w: float
    cap: float
    decode_share: float
    sequence_share: float
    saturation_tokens: int

    def prefill_w(self, tokens: int) -> float:
        """Return the watts of an iteration with `tokens` prompt tokens in total, with or without decodes."""
        full = min(tokens / self.saturation_tokens, 1.0)
        return self._watts(self.decode_share + (1.0 - self.decode_share) * full)

    def decode_w(self, sequences: int) -> float:
        """Return the watts of an iteration that decodes `sequences` sequences and no prompts."""
        return self._watts(self.decode_share + self.sequence_share * max(sequences - 1, 0))

    def _watts(self, share: float) -> float:
        return max(self.overhead_w + self.accelerators_w * min(share, self.cap), self.idle_w)


NO_POWER = InstancePower(
    idle_w=0.0, overhead_w=0.0, accelerators_w=0.0, cap=1.0, decode_share=0.0, sequence_share=0.0, saturation_tokens=1
)


@mypyc_attr(allow_interpreted_subclasses=True)
class PerformanceModel(ABC):
    """Predicts iteration times and power of an instance: one LLM on one machine type with one sharding.

    `name` is for display, such as `fitted bloom-176b on dgx-h100 TP8`. An iteration runs through the `stages` pipeline
    stages one after another, and takes the sum of their times. `power` predicts the watts: it is an `InstancePower` or
    another performance model.
    """

    name: str
    error: ModelAccuracy
    power: "InstancePower | PerformanceModel"
    stages: int = 1

    @property
    def first_stage(self) -> "PerformanceModel":
        """Performance model of the first pipeline stage alone."""
        return self

    @property
    def later_stage(self) -> "PerformanceModel":
        """Performance model of a later pipeline stage alone, including the transfer of activations to this stage."""
        return self

    @abstractmethod
    def prefill_s(self, tokens: int, squares: int) -> float:
        """Return the seconds of an iteration that contains only prompts.

        `tokens` is the number of prompt tokens that the iteration computes. `squares`, which determines the cost of
        attention, is the sum of (context + tokens)² − context² over the sequences: Σ tokens² for whole prompts.
        """

    @abstractmethod
    def decode_cost(self, sequences: int) -> DecodeCost:
        """Return the coefficients of the time of an iteration in which `sequences` sequences decode one token each."""

    @abstractmethod
    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """Return the seconds of an iteration that computes `tokens` prompt tokens and decodes `sequences` sequences.

        The decodes read `context` KV tokens in total. `squares` is as in `prefill_s`.
        """

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Return (TTFT, TPOT) in seconds of a request that runs alone on the instance.

        The mean context of its decodes is `prompt_tokens` + `output_tokens` / 2. For one output token, TPOT is the
        predicted time of a second one.
        """
        cost = self.decode_cost(1)
        context = prompt_tokens + max(output_tokens, 2) / 2
        ttft_s = self.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
        return ttft_s, cost.base_s + cost.context_s * context

    @property
    def idle_w(self) -> float:
        """Watts that the instance draws between iterations: its share of the power of its idle machine."""
        return self.power.idle_w

    def prefill_w(self, tokens: int) -> float:
        """Return the watts of an iteration with `tokens` prompt tokens in total, with or without decodes."""
        return self.power.prefill_w(tokens)

    def decode_w(self, sequences: int) -> float:
        """Return the watts of an iteration that decodes `sequences` sequences and no prompts."""
        return self.power.decode_w(sequences)
