"""How the ranks of an instance divide a model between them, and with it the KV cache: by heads and by layers.

Which rank hands which heads of which layers to which, where two instances are split in different ways.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from twofold.errors import ConfigurationError


class Sharding(msgspec.Struct, frozen=True):
    """`tensor` ranks share the heads of every layer; `pipeline` stages, of that many ranks each, divide the layers.

    Ranks are numbered stage by stage: rank = stage · tensor + shard. One rank is an instance that is not split.
    """

    tensor: int = 1
    pipeline: int = 1

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline}"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor

    def layers(self, rank: int, num_layers: int) -> range:
        """The layers of its stage: neighbours, as many as any other stage's or one more where they do not divide."""
        stage = self.stage_of(rank)
        return range(-(-stage * num_layers // self.pipeline), -(-(stage + 1) * num_layers // self.pipeline))

    def heads(self, rank: int, num_heads: int) -> range:
        """The heads that it holds of a layer that has `num_heads`, which the shards divide evenly."""
        shard, each = rank % self.tensor, num_heads // self.tensor
        return range(shard * each, (shard + 1) * each)


UNSHARDED = Sharding()


def check_sharding(split: Sharding, kv_heads: Sequence[int], heads: int, model: str) -> None:
    """Raise ConfigurationError where a model cannot be divided like this.

    `kv_heads` are the key-value heads of each layer, `heads` the query heads of any. Key-value heads are not
    copied to several ranks, so that each byte of KV has one place in an instance.
    """
    if split.pipeline > len(kv_heads):
        raise ConfigurationError(
            f"{model} has {len(kv_heads)} layers, too few for the {split.pipeline} pipeline stages of {split}"
        )
    for count, kind in ((heads, "heads"), *((each, "key-value heads") for each in kv_heads)):
        if count % split.tensor:
            raise ConfigurationError(
                f"{model} has {count} {kind}, which {split.tensor} tensor ranks ({split}) cannot share evenly"
            )


class ReshardPiece(NamedTuple):
    """What one rank of the source has for one rank of the target: these heads of each of these layers.

    Layers and heads are counted as the model does, not as either rank.
    """

    source: int
    target: int
    layers: range
    heads: range


def plan_reshard(source: Sharding, target: Sharding, kv_heads: Sequence[int]) -> list[ReshardPiece]:
    """The pieces of a hand-off, by layers; `kv_heads` has the number of key-value heads of each layer.

    Each head of each layer is in one piece, from the one rank that has it to the one that is to have it. Both splits
    must fit the model (`check_split`).
    """
    return [
        ReshardPiece(giver, taker, layers, heads)
        for run, count in _runs(kv_heads)
        for giver in range(source.ranks)
        for taker in range(target.ranks)
        if (
            layers := overlap(
                run, overlap(source.layers(giver, len(kv_heads)), target.layers(taker, len(kv_heads)))
            )
        )
        and (heads := overlap(source.heads(giver, count), target.heads(taker, count)))
    ]


def overlap(one: range, other: range) -> range:
    """What two runs of numbers have in common."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _runs(kv_heads: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Neighbouring layers that have the same number of heads, and that number."""
    start = 0
    for count, layers in groupby(kv_heads):
        stop = start + len(list(layers))
        yield range(start, stop), count
        start = stop


class LayerTraffic(NamedTuple):
    """The way of one layer from its source: ranks write side by side, each its pieces one after the other.

    `heads` is how many key-value heads the busiest of them has of it, `pieces` in how many pieces.
    """

    heads: int
    pieces: int


def layer_traffic(pieces: Sequence[ReshardPiece], num_layers: int) -> list[LayerTraffic]:
    """What bounds the time that each layer takes."""
    found = []
    for layer in range(num_layers):
        sent: dict[int, list[int]] = {}
        for piece in pieces:
            if layer in piece.layers:
                sent.setdefault(piece.source, []).append(len(piece.heads))
        found.append(
            LayerTraffic(
                max(sum(heads) for heads in sent.values()), max(len(heads) for heads in sent.values())
            )
        )
    return found
