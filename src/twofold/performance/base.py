"""Interface of performance models, which predict the time and power of an instance's iterations."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from twofold.performance.cost import DecodeCost, ModelAccuracy


@dataclass(kw_only=True)
class InstancePower:
    """Power of an instance in watts, by phase and batch size."""

    idle_w: float
    overhead_w: float
    accelerators_w: float
    cap: float  # fraction of TDP
    decode_share: float  # fraction of TDP that decoding one sequence draws
    sequence_share: float  # fraction of TDP that each further sequence adds
    saturation_tokens: int

    def prefill_w(self, tokens: int) -> float:
        """Return the watts of an iteration that computes `tokens` prompt tokens."""
        full = min(tokens / self.saturation_tokens, 1.0)
        return self._watts(self.decode_share + (1.0 - self.decode_share) * full)

    def decode_w(self, sequences: int) -> float:
        """Return the watts of an iteration that only decodes, for `sequences` sequences."""
        return self._watts(self.decode_share + self.sequence_share * max(sequences - 1, 0))

    def _watts(self, share: float) -> float:
        return max(self.overhead_w + self.accelerators_w * min(share, self.cap), self.idle_w)


NO_POWER = InstancePower(
    idle_w=0.0, overhead_w=0.0, accelerators_w=0.0, cap=1.0, decode_share=0.0, sequence_share=0.0, saturation_tokens=1
)


@mypyc_attr(allow_interpreted_subclasses=True)
class PerformanceModel(ABC):
    """Predicts the times and the power of an instance's iterations, for one LLM on one type of machine."""

    name: str  # for display, such as `fitted bloom-176b on dgx-h100 TP8`
    error: ModelAccuracy
    power: "InstancePower | PerformanceModel"  # predicts the watts
    stages: int = 1  # an iteration runs through the pipeline stages one after another

    @property
    def first_stage(self) -> "PerformanceModel":
        """Performance model of the first pipeline stage alone."""
        return self

    @property  # with the transfer of activations to the stage
    def later_stage(self) -> "PerformanceModel":
        """Performance model of one pipeline stage after the first."""
        return self

    @abstractmethod
    def prefill_s(self, tokens: int, squares: int) -> float:
        """Return the seconds of an iteration that computes `tokens` prompt tokens and decodes nothing.

        `squares` is the attention work: the sum over the prompts of e² − c², where the iteration extends the computed
        part of a prompt from c tokens to e tokens.
        """

    @abstractmethod  # linear, so that simulators can sum many iterations at once
    def decode_cost(self, sequences: int) -> DecodeCost:
        """Return the time of an iteration of `sequences` decodes alone as a linear function of total KV tokens."""

    # The decodes read `context` KV tokens in total. `squares` is as in `prefill_s`.
    @abstractmethod
    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """Return the seconds of an iteration with `tokens` prompt tokens and `sequences` decodes."""

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Return (TTFT, TPOT) in seconds of a request that runs alone on the instance."""
        cost = self.decode_cost(1)
        context = prompt_tokens + max(output_tokens, 2) / 2  # mean over the decodes, of which there is at least one
        ttft_s = self.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
        return ttft_s, cost.base_s + cost.context_s * context

    def cold_start_s(self, idle_s: float) -> float:
        """Return the seconds by which an iteration takes longer after `idle_s` seconds without iterations."""
        return 0.0

    @property
    def idle_w(self) -> float:
        """Watts that the instance draws between iterations."""
        return self.power.idle_w

    def prefill_w(self, tokens: int) -> float:
        """Return the watts of an iteration that computes `tokens` prompt tokens."""
        return self.power.prefill_w(tokens)

    def decode_w(self, sequences: int) -> float:
        """Return the watts of an iteration that only decodes, for `sequences` sequences."""
        return self.power.decode_w(sequences)
