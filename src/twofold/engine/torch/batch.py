"""One iteration as tensors: tokens packed one after the other, and what each of them may see."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from twofold.engine.base import OnLayer, SequenceStep
from twofold.engine.torch.context import Scratch
from twofold.engine.torch.parts import Part
from twofold.engine.torch.planner import is_decode, plan_parts
from twofold.engine.torch.pool import KvPool
from twofold.engine.torch.streams import Announcer


@dataclass(frozen=True, slots=True)
class LayerHooks:
    """Who is waited for, and who is told, with each layer of an iteration (see `Engine.run`)."""

    announcer: Announcer
    on_layer: OnLayer | None = None
    wait_for: OnLayer | None = None

    def written(self, layer: int) -> None:
        """This iteration's KV of the layer was put into the pool, or will be by what is queued on the device."""
        if self.wait_for is not None:
            self.wait_for(layer)
        if self.on_layer is not None:
            self.announcer.after(partial(self.on_layer, layer))


class PackedBatch:
    """The steps of an iteration: decoding sequences first, those of long context before those of short.

    `order[i]` is the step (as the caller counts) that comes i-th. `token_ids` and `positions` are [tokens]. The
    model's layer `first_layer` is the first in the pool; here layers count from there.
    """

    def __init__(
        self,
        steps: Sequence[SequenceStep],
        pool: KvPool,
        windows: Sequence[int | None],
        scratch: Scratch,
        hooks: LayerHooks,
        first_layer: int = 0,
    ) -> None:
        self.order = sorted(range(len(steps)), key=lambda i: _rank(steps[i]))
        self.hooks = hooks
        self.first_layer = first_layer
        self._steps = [steps[i] for i in self.order]
        self._pool, self._windows, self._scratch = pool, windows, scratch
        self._parts: dict[int | None, list[Part]] = {}
        self.token_ids = self._tensor([t for step in self._steps for t in step.token_ids])
        self.positions = self._tensor(
            [p for s in self._steps for p in range(s.start, s.start + len(s.token_ids))]
        )
        self._slots = self._tensor([slot for step in self._steps for slot in self._slots_of(step)])

    def sampled(self) -> tuple[list[int], torch.Tensor]:
        """Steps that sample, in packed order, as the caller counts them, and the packed index of their last token."""
        steps, rows, end = [], [], 0
        for original, step in zip(self.order, self._steps, strict=True):
            end += len(step.token_ids)
            if step.sampling is not None:
                steps.append(original)
                rows.append(end - 1)
        return steps, self._tensor(rows)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the KV of this iteration's tokens, [tokens, kv_heads, dim] each, into the pool."""
        for part, new in ((self._pool.keys(layer), keys), (self._pool.values(layer), values)):
            part.view(-1, part.shape[2], part.shape[3]).index_copy_(0, self._slots, new)

    def parts(self, layer: int) -> list[Part]:
        """The parts of the batch in packed order. Made once for each window: layers share them."""
        window = self._windows[layer]
        if window not in self._parts:
            self._parts[window] = plan_parts(self._steps, window, self._pool, self._scratch)
        return self._parts[window]

    def _slots_of(self, step: SequenceStep) -> list[int]:
        size = self._pool.layout.block_size
        table = step.block_table
        return [
            table[p // size] * size + p % size for p in range(step.start, step.start + len(step.token_ids))
        ]

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self._pool.device, non_blocking=True)


def _rank(step: SequenceStep) -> tuple[bool, int]:
    decodes = is_decode(step)
    return not decodes, -step.start if decodes else 0
