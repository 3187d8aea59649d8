"""Duration of KV hand-offs: serialized after prefill, or layer-wise during prefill (Splitwise, section 4.3)."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from twofold.errors import ConfigurationError

_LONGEST = 1 << 24  # tokens

# The paper measured layer-wise hand-offs of bloom-176b: 8 ms in all on DGX-A100 (200 GB/s) and 5 ms on DGX-H100
# (400 GB/s), where serialized is better below 512 prompt tokens. 512 tokens of 4,014,080 bytes, less the 70th part that
# both modes send after prefill, take 5.064 ms at 400 GB/s.
_SLOW_BYTES_PER_S, _SLOW_SYNC_S = 200e9, 7.71e-3
_FAST_BYTES_PER_S, _FAST_SYNC_S = 400e9, 5.064e-3


def default_sync_s(bytes_per_s: float) -> float:
    """Return the synchronization time of a layer-wise hand-off in seconds, from Splitwise's measurements."""
    # Interpolated between 200 and 400 GB/s, and constant below and above them.
    share = (bytes_per_s - _SLOW_BYTES_PER_S) / (_FAST_BYTES_PER_S - _SLOW_BYTES_PER_S)
    return _SLOW_SYNC_S + min(max(share, 0.0), 1.0) * (_FAST_SYNC_S - _SLOW_SYNC_S)


class TransferModel(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of one request's KV transfer between two instances."""

    kv_bytes_per_token: int
    layers: int
    bytes_per_s: float
    latency_s: float = 0.0  # in addition to the time for the bytes
    sync_s: float = 0.0  # in addition, in a layer-wise hand-off

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token < 1 or self.layers < 1 or self.bytes_per_s <= 0:
            raise ConfigurationError("a transfer needs KV bytes, layers and bandwidth above 0")
        if self.latency_s < 0 or self.sync_s < 0:
            raise ConfigurationError("latency and synchronization of a transfer must be at least 0 seconds")

    def serialized_s(self, tokens: int, late_s: float = 0.0) -> float:
        """Return the seconds from the end of prefill until all KV arrives in a serialized hand-off."""
        # Other transfers keep the path busy for the first `late_s` seconds.
        return late_s + self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_per_s

    def layer_wise_s(self, tokens: int, prefill_s: float, late_s: float = 0.0) -> float:
        """Return the seconds from the end of prefill until all KV arrives in a layer-wise hand-off."""
        # Sending starts `late_s` seconds after the first layer is computed. If layers are sent faster than computed,
        # only the last layer is sent after prefill. Otherwise the network transfers without pause until all bytes are
        # sent.
        bytes_s = tokens * self.kv_bytes_per_token / self.bytes_per_s
        backlog_s = bytes_s - prefill_s * (self.layers - 1) / self.layers + late_s
        return self.latency_s + max(backlog_s, bytes_s / self.layers) + self.sync_s

    def crossover_tokens(self, prefill_s: Callable[[int], float]) -> int | None:
        """Return the shortest prompt, in tokens, for which layer-wise hand-off is faster than serialized, or None."""
        # `prefill_s` must not decrease with the number of tokens.
        return shortest(lambda tokens: self.layer_wise_s(tokens, prefill_s(tokens)) < self.serialized_s(tokens))


def shortest(pays: Callable[[int], bool]) -> int | None:
    """Return the smallest number of tokens for which `pays` returns True, or None if it is above about 16 million."""
    high = 1
    while not pays(high):
        high *= 2
        if high > _LONGEST:
            return None
    left = range(high // 2 + 1, high)  # half of `high` is too few tokens, or 0
    return left.start + bisect_left(left, True, key=pays)


class PrefillSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured prefill speed: a fixed time per iteration, and a time per prompt token, both in seconds."""

    fixed_s: float
    s_per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + self.s_per_token * tokens


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speed of a link: a fixed time per transfer in seconds, and a bandwidth."""

    overhead_s: float
    bytes_per_s: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> "LinkSpeed":
        """Fit the speed to two transfers, each given as (bytes, seconds)."""
        (few, few_s), (many, many_s) = small, large
        per_byte_s = max(many_s - few_s, many_s * 0.01) / (many - few)
        # At least half of the smaller transfer's time is fixed.
        return cls(overhead_s=max(few_s / 2, few_s - few * per_byte_s), bytes_per_s=1.0 / per_byte_s)

    def transfer(self, kv_bytes_per_token: int, layers: int) -> TransferModel:
        """Return the timing of a layer-wise hand-off over this link, with one transfer per layer."""
        return TransferModel(
            kv_bytes_per_token=kv_bytes_per_token,
            layers=layers,
            bytes_per_s=self.bytes_per_s,
            latency_s=self.overhead_s,  # of the last layer
            sync_s=(layers - 1) * self.overhead_s,  # of the other layers
        )


def reshard_path(link: LinkSpeed, layer_bytes: Sequence[int], pieces: Sequence[int]) -> TransferModel:
    """Return the timing of a layer-wise hand-off between instances with different sharding."""
    # Ranks send their parts of a layer in parallel, and layers one after another. For each layer, `layer_bytes` has the
    # most bytes per token, and `pieces` the most transfers, that any one rank sends.
    layers = len(layer_bytes)
    return TransferModel(
        kv_bytes_per_token=sum(layer_bytes),
        layers=layers,
        bytes_per_s=link.bytes_per_s,
        latency_s=pieces[-1] * link.overhead_s,
        sync_s=sum(pieces[:-1]) * link.overhead_s,
    )
