"""What a hand-off costs that goes from ranks to other ranks: the link of a rank, and what it has to carry."""

from collections.abc import Sequence

from twofold.performance.measured import LinkSpeed
from twofold.performance.transfer import TransferModel


def reshard_path(link: LinkSpeed, layer_bytes: Sequence[int], pieces: Sequence[int]) -> TransferModel:
    """The path of a hand-off whose layers go one after the other, each from several ranks side by side.

    Of each layer, `layer_bytes` is what the busiest rank has of one token, and `pieces` in how many transfers it
    sends that. Every rank has a `link` of its own. Layers of other stages count as if they left after one
    another too, as they do while they are computed; once all are, less time may do.
    """
    layers = len(layer_bytes)
    return TransferModel(
        kv_bytes_per_token=sum(layer_bytes),
        layers=layers,
        bytes_per_s=link.bytes_per_s,
        latency_s=pieces[-1] * link.overhead_s,
        sync_s=sum(pieces[:-1]) * link.overhead_s,
    )
