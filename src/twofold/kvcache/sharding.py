"""Sharding of a model and its KV cache over the ranks of an instance, and hand-offs between different shardings."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from twofold.errors import ConfigurationError


class Sharding(msgspec.Struct, frozen=True):
    """Degrees of tensor and pipeline parallelism of an instance."""

    # Ranks are numbered by stage: rank = stage · tensor + shard.
    tensor: int = 1  # ranks among which the heads of each layer are divided
    pipeline: int = 1  # stages among which the layers are divided

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline}"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    def layers(self, rank: int, num_layers: int) -> range:
        """Return the layers on `rank`, of a model with `num_layers` layers."""
        stage = rank // self.tensor  # stages differ by at most one layer
        return range(-(-stage * num_layers // self.pipeline), -(-(stage + 1) * num_layers // self.pipeline))

    def heads(self, rank: int, num_heads: int) -> range:
        """Return the indices of the heads that rank `rank` holds in a layer with `num_heads` heads."""
        shard, each = rank % self.tensor, num_heads // self.tensor
        return range(shard * each, (shard + 1) * each)


UNSHARDED = Sharding()


def check_sharding(sharding: Sharding, kv_heads: Sequence[int], heads: int, model: str) -> None:
    """Raise ConfigurationError if a model does not support this sharding."""
    if sharding.pipeline > len(kv_heads):
        raise ConfigurationError(
            f"{model} has {len(kv_heads)} layers, too few for the {sharding.pipeline} pipeline stages of {sharding}"
        )
    # KV heads are not replicated. `kv_heads` has their number in each layer.
    for count, kind in ((heads, "heads"), *((each, "key-value heads") for each in kv_heads)):
        if count % sharding.tensor:
            raise ConfigurationError(
                f"{model} has {count} {kind}, which {sharding.tensor} tensor ranks ({sharding}) cannot share evenly"
            )


class ReshardPiece(NamedTuple):
    """Layers and heads that rank `source` sends to rank `target` in a hand-off."""

    source: int
    target: int
    layers: range  # numbered as in the whole model
    heads: range  # numbered as in the whole model


def plan_reshard(source: Sharding, target: Sharding, kv_heads: Sequence[int]) -> list[ReshardPiece]:
    """Return which layers and KV heads each source rank sends to each target rank in a hand-off."""
    num_layers = len(kv_heads)
    # Every head of every layer is in one piece.
    return [
        ReshardPiece(sender, receiver, layers, heads)
        for run, count in _runs(kv_heads)
        for sender in range(source.ranks)
        for receiver in range(target.ranks)
        if (layers := overlap(run, overlap(source.layers(sender, num_layers), target.layers(receiver, num_layers))))
        and (heads := overlap(source.heads(sender, count), target.heads(receiver, count)))
    ]


def overlap(one: range, other: range) -> range:
    """Return the intersection of two ranges."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _runs(kv_heads: Sequence[int]) -> Iterator[tuple[range, int]]:
    start = 0
    for count, layers in groupby(kv_heads):
        stop = start + len(list(layers))
        yield range(start, stop), count
        start = stop


class LayerTraffic(NamedTuple):
    """Maximum number of KV heads, and of transfers, that a rank sends for one layer of a KV hand-off."""

    heads: int
    pieces: int


def layer_traffic(pieces: Sequence[ReshardPiece], num_layers: int) -> list[LayerTraffic]:
    """Return the largest traffic that any rank sends, for each layer of a KV hand-off.

    The number of KV heads and the number of transfers are maximized over the ranks separately.
    """
    found = []
    for layer in range(num_layers):
        sent: dict[int, list[int]] = {}
        for piece in pieces:
            if layer in piece.layers:
                sent.setdefault(piece.source, []).append(len(piece.heads))
        found.append(LayerTraffic(max(map(sum, sent.values())), max(map(len, sent.values()))))
    return found
