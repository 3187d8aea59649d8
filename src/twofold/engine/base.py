"""The interface between a worker and its engine: KV layout, steps of an iteration, and sampled tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from twofold.kvcache.sharding import Sharding
from twofold.request import SamplingParams


class LayerShape(msgspec.Struct, frozen=True):
    """KV of one attention layer: keys are [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KvLayout(msgspec.Struct, frozen=True):
    """Layout of a KV cache. Both ends of a hand-off must have the same one.

    The pool of `num_blocks` blocks is contiguous: for each layer its keys [num_blocks, block_size, kv_heads,
    key_dim], then its values [num_blocks, block_size, kv_heads, value_dim].
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
        """Bytes of one KV head in one block of one layer."""
        shape = self.layers[layer]
        return (shape.key_dim + shape.value_dim) * self.block_size * self.itemsize

    def pool_bytes(self, num_blocks: int) -> int:
        return self.bytes_per_block * num_blocks

    @property
    def kv_heads(self) -> list[int]:
        """Number of KV heads of each layer."""
        return [layer.kv_heads for layer in self.layers]

    def of_rank(self, split: Sharding, rank: int) -> "KvLayout":
        """Return the layout of one rank's shard: its heads of its layers."""
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
    `block_table`, which cover positions from 0, `block_size` positions each. `sampling` is None if no token is
    sampled (a chunk that does not complete its prompt). `output_index` is the index of the sampled output
    token, from 0. `copies` are shared blocks (from, to) that are copied before the iteration, so that this
    sequence can write to its own copy.
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
    """A sampled token, with log probabilities (natural, before temperature) if requested."""

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
        self, steps: Sequence[SequenceStep], on_layer: OnLayer | None = None, wait_for: OnLayer | None = None
    ) -> list[Sampled | None]:
        """Run one iteration. The result has one entry per step, None if no token was sampled.

        `on_layer(k)` is called when the KV of layer k of all steps is in the pool, while later layers are
        computed. Calls are in order of layers and end before `run` returns, but may come from another thread.
        `wait_for(k)` is called in the forward pass before layer k's attention; it returns when all cached KV
        that the iteration reads of this layer is in the pool.
        """


IterationDone = Callable[[list[Sampled | None]], None]


class PipelineEngine(Engine, Protocol):
    """An engine with several pipeline stages, each of which can run another iteration."""

    def begin(self, steps: Sequence[SequenceStep], on_layer: OnLayer | None, ended: IterationDone) -> None:
        """Start an iteration of at least one step; return when the first stage has computed it.

        `ended` is called from another thread with the result of `run`, in the order in which iterations were
        started. All stages compute iterations in that order, so a step may read KV of an earlier iteration that
        has not ended.
        """
