"""Interface between a worker and an engine: KV layout, the work of an iteration, and sampled tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from twofold.kvcache.sharding import Sharding
from twofold.request import SamplingParams, TokenScore


class LayerShape(msgspec.Struct, frozen=True):
    """KV shape of one attention layer: keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KvGroup(msgspec.Struct, frozen=True):
    """Layers of one kind in vLLM's KV cache, which have their own blocks for a request."""

    kind: str  # as in "sliding_window"
    block_size: int
    window: int  # tokens of a window or chunk; 0 if unlimited
    stored_as: str  # number formats, and the order of dimensions
    layers: tuple[str, ...]  # none if it is the only group


class KvLayout(msgspec.Struct, frozen=True):
    """Layout of a KV cache in one contiguous memory of `num_blocks` blocks.

    For each layer, it has the keys [num_blocks, block_size, kv_heads, key_dim], followed by the values [num_blocks,
    block_size, kv_heads, value_dim]. With `heads_first`, as in vLLM, the heads come before the tokens of a block.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: str  # a torch dtype's name, as in "float32"
    itemsize: int  # bytes of one number
    heads_first: bool = False
    groups: tuple[KvGroup, ...] = ()  # if layers have different blocks; a layer of `layers` then has one of each group

    @property
    def bytes_per_token(self) -> int:
        numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return numbers * self.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def layer_bytes_per_block(self, layer: int) -> int:
        """Return the size in bytes of one block in one layer, keys and values together."""
        return self.layers[layer].kv_heads * self.head_bytes_per_block(layer)

    def head_bytes_per_block(self, layer: int) -> int:
        """Return the size in bytes of one KV head in one block of one layer, keys and values together."""
        shape = self.layers[layer]
        return (shape.key_dim + shape.value_dim) * self.block_size * self.itemsize

    def bytes_of(self, layers: range, blocks: int) -> int:
        """Return the size in bytes of the given layers of `blocks` KV blocks."""
        return blocks * sum(map(self.layer_bytes_per_block, layers))

    def pool_bytes(self, num_blocks: int) -> int:
        return self.bytes_per_block * num_blocks

    @property
    def kv_heads(self) -> list[int]:
        """Return the number of KV heads of each layer."""
        return [layer.kv_heads for layer in self.layers]

    def of_rank(self, split: Sharding, rank: int) -> "KvLayout":
        """Return the KV layout of one rank, which holds only a part of the KV heads and layers."""
        held = split.layers(rank, len(self.layers))
        layers = tuple(
            msgspec.structs.replace(layer, kv_heads=len(split.heads(rank, layer.kv_heads)))
            for layer in self.layers[held.start : held.stop]
        )
        return msgspec.structs.replace(self, layers=layers)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The work of one iteration for one sequence: a prompt chunk or a decode."""

    request_id: str
    token_ids: Sequence[int]
    start: int  # position of the first of these tokens
    block_table: Sequence[int]  # blocks of the sequence from position 0 on
    sampling: SamplingParams | None  # None: a chunk that does not complete the prompt
    output_index: int = 0  # index of the sampled token in the output
    history: Sequence[int] = ()  # all tokens before the sampled one, if `sampling` needs them
    scored_ids: Sequence[int] = ()  # prompt tokens to score, each of which follows a token of this step
    top: int = 0  # number of most likely tokens in each score
    # Pairs (shared block, own block): the engine copies the shared block before the iteration.
    copies: Sequence[tuple[int, int]] = ()


NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token with its optional log probabilities, or NO_TOKEN with the scores of a prompt chunk."""

    token_id: int
    logprob: float | None = None  # natural logarithm, without temperature
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()  # of the step's `scored_ids`
    error: str | None = None  # why no token could be sampled


OnLayer = Callable[[int], None]  # called in the order of layers, before the iteration ends


class Engine(Protocol):
    """Interface of an engine, which runs iterations over a paged KV cache."""

    @property
    def layout(self) -> KvLayout: ...
    @property
    def num_blocks(self) -> int: ...

    def run(
        self, steps: Sequence[SequenceStep], on_layer: OnLayer | None = None, wait_for: OnLayer | None = None
    ) -> list[Sampled | None]:
        """Run one iteration, and return the sampled token of each sequence in the order of `steps`.

        A sequence whose prompt is not fully computed yet gets None, or the scores of its chunk without a token. The
        engine calls `on_layer(k)` after writing the KV of layer k, possibly from another thread. Before the attention
        of layer k, the engine calls `wait_for(k)`, which waits for cached KV.
        """


IterationDone = Callable[[list[Sampled | None]], None]


class PipelineEngine(Engine, Protocol):
    """Interface of an engine with several pipeline stages, which can compute different iterations at the same time."""

    # Each stage computes iterations in order, so a step may read KV of an earlier iteration that has not ended.
    def begin(self, steps: Sequence[SequenceStep], on_layer: OnLayer | None, ended: IterationDone) -> None:
        """Start an iteration; return when the first stage has computed it.

        At the end of the iteration, the engine calls `ended` with the sampled tokens, from another thread.
        """
