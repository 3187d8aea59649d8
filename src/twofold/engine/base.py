"""The engine seam: the memory a batch works on, what goes into an iteration and what comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from twofold.kvcache.sharding import Sharding
from twofold.request import SamplingParams


class LayerShape(msgspec.Struct, frozen=True):
    """KV of one attention layer: keys are [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KvLayout(msgspec.Struct, frozen=True):
    """How an engine lays out its KV cache; both ends of a hand-off must agree on all of it.

    The pool of `num_blocks` blocks is one run of bytes: for each layer its keys
    [num_blocks, block_size, kv_heads, key_dim] and then its values [num_blocks, block_size, kv_heads, value_dim].
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: str  # a torch dtype's name, as in "float32"
    itemsize: int  # bytes of one number

    @property
    def bytes_per_token(self) -> int:
        numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return numbers * self.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def layer_bytes_per_block(self, layer: int) -> int:
        """Bytes of one block of one layer, keys and values together."""
        return self.layers[layer].kv_heads * self.head_bytes_per_block(layer)

    def head_bytes_per_block(self, layer: int) -> int:
        """The same of one head."""
        shape = self.layers[layer]
        return (shape.key_dim + shape.value_dim) * self.block_size * self.itemsize

    def pool_bytes(self, num_blocks: int) -> int:
        return self.bytes_per_block * num_blocks

    @property
    def kv_heads(self) -> list[int]:
        """The key-value heads of each layer."""
        return [layer.kv_heads for layer in self.layers]

    def of_rank(self, split: Sharding, rank: int) -> "KvLayout":
        """What one rank keeps where an instance is split: its heads of its layers."""
        held = split.layers(rank, len(self.layers))
        layers = tuple(
            msgspec.structs.replace(layer, kv_heads=len(split.heads(rank, layer.kv_heads)))
            for layer in self.layers[held.start : held.stop]
        )
        return msgspec.structs.replace(self, layers=layers)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part in an iteration.

    The KV of `token_ids` (positions `start`, `start`+1, …) is computed and written to the blocks of
    `block_table`, which cover positions 0 onwards, `block_size` positions each. `sampling` is None where no
    token is to be sampled (a chunk that does not end the prompt). `output_index` is the index of the output
    token that would be sampled, counted from 0. `copies` are blocks (from, to) that are copied whole before
    anything is computed: this sequence writes to the copy, and others go on with what it is a copy of.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None
    output_index: int = 0
    copies: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token; log probabilities (natural log, before temperature) only where they were asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


OnLayer = Callable[[int], None]


class Engine(Protocol):
    """Runs iterations over a paged KV cache."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    def run(
        self,
        steps: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        wait_for: OnLayer | None = None,
    ) -> list[Sampled | None]:
        """Run one iteration; the result has one entry per step, None where nothing was sampled.

        `on_layer(k)` is called as soon as the KV of layer k of every step is in the pool, while later layers are
        still to come; it may be called from another thread, but for each layer in turn and before `run` returns.
        `wait_for(k)` is called from inside the forward pass before layer k's attention, and before `on_layer(k)`: it
        returns when all is in the pool that this iteration reads of the layer and does not compute.
        """
        ...


IterationDone = Callable[[list[Sampled | None]], None]


@runtime_checkable
class PipelineEngine(Engine, Protocol):
    """An engine of several stages, which can have an iteration under way on each."""

    def begin(self, steps: Sequence[SequenceStep], on_layer: OnLayer | None, ended: IterationDone) -> None:
        """Start an iteration of at least one step; return when the first stage is done with it.

        `ended` is called with what `run` would return when the last stage is done: from another thread, and in the
        order in which iterations were started. They pass each stage in that order, so what a step reads of the cache
        may be written by an earlier iteration that is still under way.
        """
        ...
