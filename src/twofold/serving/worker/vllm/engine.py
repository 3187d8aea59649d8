"""vLLM as far as a worker measures it before it is part of the service."""

from collections.abc import Sequence

from twofold.engine.base import KvLayout, OnLayer, Sampled, SequenceStep
from twofold.engine.vllm.core import VllmCore
from twofold.engine.vllm.sampling import greedy_for
from twofold.request import SamplingParams


class VllmEngine:
    """An `Engine` that computes prompts which nobody asked for; requests go to vLLM's own scheduler."""

    def __init__(self, core: VllmCore, layout: KvLayout, num_blocks: int) -> None:
        self._core = core
        self.layout, self.num_blocks = layout, num_blocks
        self._runs = 0

    def run(
        self,
        steps: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,  # noqa: ARG002  (nobody asks to be told)
        wait_for: OnLayer | None = None,  # noqa: ARG002  (the same)
    ) -> list[Sampled | None]:
        """Compute whole prompts (`start` is 0); where and in how many iterations is vLLM's business."""
        for step in steps:
            self._runs += 1
            sampling = greedy_for(SamplingParams(max_tokens=1, temperature=0.0), 0, 1, frozenset())
            name = f"measured {self._runs}"
            self._core.add(name, step.token_ids, sampling, name)
        while self._core.busy:
            self._core.step()
        return [None] * len(steps)
