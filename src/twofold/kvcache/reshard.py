"""Which rank hands which heads of which layers to which, where two instances are split in different ways."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from twofold.kvcache.split import Split


class Piece(NamedTuple):
    """What one rank of the source has for one rank of the target: these heads of each of these layers.

    Layers and heads are counted as the model does, not as either rank.
    """

    source: int
    target: int
    layers: range
    heads: range


def plan_reshard(source: Split, target: Split, kv_heads: Sequence[int]) -> list[Piece]:
    """The pieces of a hand-off, by layers; `kv_heads` has the number of key-value heads of each layer.

    Each head of each layer is in one piece, from the one rank that has it to the one that is to have it. Both splits
    must fit the model (`check_split`).
    """
    return [
        Piece(giver, taker, layers, heads)
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


def traffic(pieces: Sequence[Piece], num_layers: int) -> list[LayerTraffic]:
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
