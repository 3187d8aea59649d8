"""How long a hand-off takes: all of the KV cache after prefill, or layer by layer beside it.

After section 4.3 of the Splitwise paper. Layer-wise costs synchronisation that the user sees after the first
token; serialized costs the whole transfer. So long prompts go layer by layer and short ones at once.

What was measured of a live service: how fast an instance prefills, and what the way to a peer carries.

What a hand-off costs that goes from ranks to other ranks: the link of a rank, and what it has to carry.
"""

from collections.abc import Callable, Sequence

import msgspec

from twofold.errors import ConfigurationError

_LONGEST = 1 << 24  # tokens: no prompt is longer, so a crossover beyond it is none

# What the paper saw of layer-wise hand-offs of bloom-176b beside the last layer's transfer: 8 ms in all on DGX-A100
# (200 GB/s) and 5 ms on DGX-H100 (400 GB/s), where serialized is better below 512 prompt tokens. 512 tokens
# of 4,014,080 bytes, less the 70th part that both modes send after prefill, take 5.064 ms at 400 GB/s.
_SLOW_BYTES_PER_S, _SLOW_SYNC_S = 200e9, 7.71e-3
_FAST_BYTES_PER_S, _FAST_SYNC_S = 400e9, 5.064e-3


def default_sync_s(bytes_per_s: float) -> float:
    """Seconds of synchronisation of a layer-wise hand-off over a machine's network.

    The two measured machines at 200 and 400 GB/s, a straight line between them, and no guess beyond them.
    """
    share = (bytes_per_s - _SLOW_BYTES_PER_S) / (_FAST_BYTES_PER_S - _SLOW_BYTES_PER_S)
    return _SLOW_SYNC_S + min(max(share, 0.0), 1.0) * (_FAST_SYNC_S - _SLOW_SYNC_S)


class TransferModel(msgspec.Struct, frozen=True, kw_only=True):
    """The path of one request's KV cache from one instance to another, with nobody else on it.

    `latency_s` is the fixed cost of starting a transfer; `sync_s` the synchronisation that a layer-wise
    hand-off adds after the first token.
    """

    kv_bytes_per_token: int
    layers: int
    bytes_per_s: float
    latency_s: float = 0.0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token < 1 or self.layers < 1 or self.bytes_per_s <= 0:
            raise ConfigurationError("a transfer needs KV bytes, layers and bandwidth above 0")
        if self.latency_s < 0 or self.sync_s < 0:
            raise ConfigurationError("latency and synchronisation of a transfer cannot be below 0 seconds")

    def serialized_s(self, tokens: int, late_s: float = 0.0) -> float:
        """Seconds after prefill until all the KV cache of `tokens` has landed.

        `late_s` is how long after prefill others still have the path.
        """
        return late_s + self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_per_s

    def layer_wise_s(self, tokens: int, prefill_s: float, late_s: float = 0.0) -> float:
        """Seconds after prefill until the last layer has landed, when each left as soon as it was computed.

        The first layer leaves after 1/layers of prefill, or `late_s` later where others have the path until then. A
        network faster than prefill leaves only the last layer to wait for; a slower one works without a pause and
        ends when all bytes are through.
        """
        bytes_s = tokens * self.kv_bytes_per_token / self.bytes_per_s
        backlog_s = bytes_s - prefill_s * (self.layers - 1) / self.layers + late_s
        return self.latency_s + max(backlog_s, bytes_s / self.layers) + self.sync_s

    def crossover_tokens(self, prefill_s: Callable[[int], float]) -> int | None:
        """The shortest prompt whose layer-wise hand-off leaves less to wait for than a serialized one.

        `prefill_s` gives the seconds of a prefill of that many tokens and must not fall. None where no
        prompt is long enough, because synchronisation costs more than all the prefill could hide.
        """
        high = 1
        while not self._layer_wise_wins(high, prefill_s):
            high *= 2
            if high > _LONGEST:
                return None
        low = high // 2  # layer-wise does not win here (or low is 0)
        while high - low > 1:
            middle = (low + high) // 2
            if self._layer_wise_wins(middle, prefill_s):
                high = middle
            else:
                low = middle
        return high

    def _layer_wise_wins(self, tokens: int, prefill_s: Callable[[int], float]) -> bool:
        return self.layer_wise_s(tokens, prefill_s(tokens)) < self.serialized_s(tokens)


class PrefillSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a prefill: some for each iteration, and some for each token of the prompt."""

    fixed_s: float
    s_per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + self.s_per_token * tokens


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one instance to another: what each transfer costs by itself, and then per byte."""

    overhead_s: float
    bytes_per_s: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> "LinkSpeed":
        """From two transfers, as (bytes, seconds). However noisy they are, half of the small one's time is overhead."""
        (few, few_s), (many, many_s) = small, large
        per_byte_s = max(many_s - few_s, many_s * 0.01) / (many - few)
        return cls(overhead_s=max(few_s / 2, few_s - few * per_byte_s), bytes_per_s=1.0 / per_byte_s)

    def transfer(self, kv_bytes_per_token: int, layers: int) -> TransferModel:
        """The path of a hand-off over it, if each layer is sent by itself.

        Then each but the last costs an overhead more, on the link and to the prefill beside it.
        """
        return TransferModel(
            kv_bytes_per_token=kv_bytes_per_token,
            layers=layers,
            bytes_per_s=self.bytes_per_s,
            latency_s=self.overhead_s,
            sync_s=(layers - 1) * self.overhead_s,
        )


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
