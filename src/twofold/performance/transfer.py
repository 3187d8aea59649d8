"""Duration of KV hand-offs: serialized after prefill, or layer-wise during prefill (Splitwise, section 4.3).

After the first token, a layer-wise hand-off needs only synchronization, so it suits long prompts.
"""

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
    """Return the synchronization seconds of a layer-wise hand-off over a network with this bandwidth.

    It is interpolated between Splitwise's measurements at 200 and 400 GB/s, and constant below and above them.
    """
    share = (bytes_per_s - _SLOW_BYTES_PER_S) / (_FAST_BYTES_PER_S - _SLOW_BYTES_PER_S)
    return _SLOW_SYNC_S + min(max(share, 0.0), 1.0) * (_FAST_SYNC_S - _SLOW_SYNC_S)


class TransferModel(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of one request's KV transfer between two instances, without other traffic on the path.

    A transfer takes `latency_s` seconds in addition to the time for its bytes, and a layer-wise one `sync_s` more.
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
            raise ConfigurationError("latency and synchronization of a transfer must be at least 0 seconds")

    def serialized_s(self, tokens: int, late_s: float = 0.0) -> float:
        """Return the seconds from the end of prefill until `tokens` tokens of KV arrive in a serialized hand-off.

        Other transfers keep the path busy for the first `late_s` seconds.
        """
        return late_s + self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_per_s

    def layer_wise_s(self, tokens: int, prefill_s: float, late_s: float = 0.0) -> float:
        """Return the seconds from the end of prefill until the last layer arrives in a layer-wise hand-off.

        Sending starts `late_s` seconds after the first layer is computed. If layers are sent faster than computed, only
        the last layer is sent after prefill. Otherwise the network transfers without pause until all bytes are sent.
        """
        bytes_s = tokens * self.kv_bytes_per_token / self.bytes_per_s
        backlog_s = bytes_s - prefill_s * (self.layers - 1) / self.layers + late_s
        return self.latency_s + max(backlog_s, bytes_s / self.layers) + self.sync_s

    def crossover_tokens(self, prefill_s: Callable[[int], float]) -> int | None:
        """Return the shortest prompt, in tokens, for which a layer-wise hand-off ends sooner than a serialized one.

        `prefill_s` maps tokens to seconds and must not decrease. Return None if serialized hand-off is never slower.
        """
        return shortest(lambda tokens: self.layer_wise_s(tokens, prefill_s(tokens)) < self.serialized_s(tokens))


def shortest(pays: Callable[[int], bool]) -> int | None:
    """Return the smallest number of tokens for which `pays` returns True, by bisection, or None if it exceeds 2^24."""
    high = 1
    while not pays(high):
        high *= 2
        if high > _LONGEST:
            return None
    low = high // 2  # too few tokens, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


class PrefillSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured prefill speed: a fixed time per iteration, and a time per prompt token, both in seconds."""

    fixed_s: float
    s_per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + self.s_per_token * tokens


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speed of a link between two instances: a fixed time per transfer in seconds, and a bandwidth."""

    overhead_s: float
    bytes_per_s: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> "LinkSpeed":
        """Fit the speed to two transfers (bytes, seconds). At least half of the smaller one's time counts as fixed."""
        (few, few_s), (many, many_s) = small, large
        per_byte_s = max(many_s - few_s, many_s * 0.01) / (many - few)
        return cls(overhead_s=max(few_s / 2, few_s - few * per_byte_s), bytes_per_s=1.0 / per_byte_s)

    def transfer(self, kv_bytes_per_token: int, layers: int) -> TransferModel:
        """Return the timing model of a layer-wise hand-off over this link, with one transfer per layer.

        The fixed time of the last layer's transfer counts as latency, and that of other layers as synchronization.
        """
        return TransferModel(
            kv_bytes_per_token=kv_bytes_per_token,
            layers=layers,
            bytes_per_s=self.bytes_per_s,
            latency_s=self.overhead_s,
            sync_s=(layers - 1) * self.overhead_s,
        )


def reshard_path(link: LinkSpeed, layer_bytes: Sequence[int], pieces: Sequence[int]) -> TransferModel:
    """Return the timing model of a layer-wise hand-off between instances with different sharding.

    Ranks send their parts of a layer in parallel, each at the speed `link`; layers are sent one after another. For each
    layer, `layer_bytes` has the most bytes per token, and `pieces` the most transfers, that any one rank sends.
    """
    layers = len(layer_bytes)
    return TransferModel(
        kv_bytes_per_token=sum(layer_bytes),
        layers=layers,
        bytes_per_s=link.bytes_per_s,
        latency_s=pieces[-1] * link.overhead_s,
        sync_s=sum(pieces[:-1]) * link.overhead_s,
    )
