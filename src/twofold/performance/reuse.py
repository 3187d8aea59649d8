"""Reuse or recompute: when loading a prefix's KV cache beats computing it again.

Mooncake (FAST'25) counts what a prompt of p tokens takes to prefill as `l·(a·p²·d + b·p·d²)` FLOPs, and its
KV cache as `2·p·l·d·s / gqa` bytes: l layers of width d, s bytes a value, gqa query heads to a KV head, a = 4 for
attention over the whole square, b = 22 for the matrices of LLaMA-70B. At G FLOP/s and B bytes per second loading is
quicker where

    B / G > 2·d·s / (gqa·(a·p·d + b·d²))

which falls as p grows: a longer prefix is worth loading over a slower link. `PrefixCost` has both counts per
token, of the
paper's model or any other; `prefix_bytes_per_s` and `shortest_prefix` ask a performance model instead, whose
accelerators are not at their peak. It also knows what a prefill costs whatever its length, which nobody saves: the rest
of the prompt is computed either way. Layers are loaded while others are computed (layer-wise prefill), so a prompt of
which a part is reused takes as long as the longer of the two: `reuse_s`.

A prefill that loads KV which is there already, and stores what it computes, layer by layer.

Mooncake (arXiv 2407.00079) section 5.2: before the attention of layer l its load is waited for and that of layer l + 1
begins; after it the store of layer l begins. Loads, computation and stores are three lanes which each take one layer
after the other, so a prefill takes about as long as the slowest of them alone, and a layer of each other one.
"""

import math
from collections.abc import Callable

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.specs import Model
from twofold.performance.base import PerformanceModel

_LONGEST = 1 << 24  # tokens: no prompt is longer, so a break-even beyond it is none
REST = 512  # tokens of a prompt after its prefix, where nothing else is said
_ATTENTION = 4  # FLOPs for each pair of tokens and value of a head: scores and their sum


class PrefixCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a token has of KV cache in bytes, and what computing n tokens takes: `flops·n + square_flops·n²` FLOPs."""

    kv_bytes: float
    flops: float
    square_flops: float

    @classmethod
    def of(cls, model: Model) -> "PrefixCost":
        """Two FLOPs for each active parameter, and attention as the paper counts it."""
        return cls(
            kv_bytes=model.kv_bytes_per_token,
            flops=2 * model.active_parameters,
            square_flops=_ATTENTION * model.layers * model.heads * model.head_dim,
        )

    def bytes_per_s(self, prefix: int, flops_per_s: float) -> float:
        """The bandwidth above which loading so many tokens is quicker than computing them at `flops_per_s`."""
        _require_tokens(prefix)
        return flops_per_s * self.kv_bytes / (self.flops + self.square_flops * prefix)

    def shortest_prefix(self, bytes_per_s: float, flops_per_s: float) -> int:
        """The least number of tokens that are loaded in less time than they are computed: the same, the other way."""
        _require_bandwidth(bytes_per_s)
        flops = flops_per_s * self.kv_bytes / bytes_per_s  # done while a token's KV cache is loaded
        return max(0, math.floor((flops - self.flops) / self.square_flops)) + 1


# LLaMA-70B as the paper counts it: 80 layers of 8,192, eight query heads to a KV head, two bytes a value.
PUBLISHED = PrefixCost(
    kv_bytes=2 * 80 * 8192 * 2 / 8, flops=80 * 22 * 8192**2, square_flops=80 * _ATTENTION * 8192
)


def prefix_bytes_per_s(model: PerformanceModel, kv_bytes: int, prefix: int, rest: int = REST) -> float:
    """The bandwidth above which loading the first `prefix` tokens of a prompt is quicker than computing them too."""
    _require_tokens(prefix)
    saved = saved_s(model, prefix, rest)
    return prefix * kv_bytes / saved if saved > 0 else math.inf


def shortest_prefix(
    model: PerformanceModel, kv_bytes: int, bytes_per_s: float, latency_s: float = 0.0, rest: int = REST
) -> int | None:
    """The shortest prefix that is loaded in less time than it is computed; None where none is.

    `latency_s` is the fixed cost of starting to load.
    """
    _require_bandwidth(bytes_per_s)

    def pays(tokens: int) -> bool:
        return latency_s + tokens * kv_bytes / bytes_per_s < saved_s(model, tokens, rest)

    return _least(pays)


def saved_s(model: PerformanceModel, prefix: int, rest: int = REST) -> float:
    """Seconds of prefill that a prefix which is there saves a prompt of `rest` tokens more."""
    prompt = prefix + rest
    return model.prefill_s(prompt, prompt * prompt) - reuse_s(model, prompt, prefix, 0.0)


def reuse_s(model: PerformanceModel, prompt: int, reused: int, load_s: float) -> float:
    """Seconds of a prefill of `prompt` tokens of which `reused` are loaded in `load_s` beside it, layer by layer."""
    return max(load_s, model.prefill_s(prompt - reused, prompt * prompt - reused * reused))


def _least(pays: Callable[[int], bool]) -> int | None:
    """The least number of tokens from which on it pays, by bisection between powers of two."""
    high = 1
    while not pays(high):
        high *= 2
        if high > _LONGEST:
            return None
    low = high // 2  # it does not pay here (or low is 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _require_bandwidth(bytes_per_s: float) -> None:
    if not bytes_per_s > 0:
        raise ConfigurationError(f"loading needs a bandwidth above 0, not {bytes_per_s:g} bytes per second")


def _require_tokens(prefix: int) -> None:
    if prefix < 1:
        raise ConfigurationError(f"a prefix has at least one token, not {prefix}")


def layer_wise(layers: int, *lanes: float) -> float:
    """The time from the beginning of the first lane to the end of the last, in the unit of `lanes`.

    Each lane is the time that it takes for all layers if it never waits; layers are equal. A lane begins with a layer
    when it is through with the layer before, and the lane before it with this one:

        Σ lanes / layers + (layers − 1) · max(lanes) / layers

    A lane that has nothing to do takes no time and is best left out.
    """
    return (sum(lanes) + (layers - 1) * max(lanes)) / layers
