"""Reuse or recompute: when loading the KV cache of a prefix is faster than computing it again.

Mooncake (FAST'25) counts `l·(a·p²·d + b·p·d²)` FLOPs for the prefill of a prompt of p tokens, and `2·p·l·d·s / gqa`
bytes for its KV cache: l layers of width d, s bytes per value, gqa query heads per KV head, a = 4 for full-square
attention, b = 22 for the matrices of LLaMA-70B. At G FLOP/s and B bytes per second, loading is faster if

    B / G > 2·d·s / (gqa·(a·p·d + b·d²))

The bound falls with p: longer prefixes are worth loading over slower links. `PrefixCost` computes the bound from FLOPs
and bytes at peak performance. `prefix_bytes_per_s` and `shortest_prefix` use a performance model instead, which
includes the fixed cost of a prefill. Reuse does not save that cost, because the rest of the prompt must be computed.

Loads and stores of layers overlap with computation (Mooncake, arXiv 2407.00079, section 5.2). The attention of layer l
waits for the load of layer l, while layer l + 1 loads; layer l is stored after its attention. Loads, computation and
stores are three parallel lanes that each process one layer after the other.
"""

import math

import msgspec

from twofold.errors import require
from twofold.hardware.specs import Model
from twofold.performance.base import PerformanceModel
from twofold.performance.transfer import shortest

REST = 512  # default number of prompt tokens after the prefix
_ATTENTION = 4  # FLOPs per token pair and head value: scores and weighted sum


class PrefixCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a prefix: KV cache bytes per token, and `flops·n + square_flops·n²` FLOPs to compute n tokens."""

    kv_bytes: float
    flops: float
    square_flops: float

    @classmethod
    def of(cls, model: Model) -> "PrefixCost":
        """Return the cost for a catalog model: two FLOPs per active parameter, and attention as in the paper."""
        return cls(
            kv_bytes=model.kv_bytes_per_token,
            flops=2 * model.active_parameters,
            square_flops=_ATTENTION * model.layers * model.heads * model.head_dim,
        )

    def bytes_per_s(self, prefix: int, flops_per_s: float) -> float:
        """Return the bandwidth above which loading `prefix` tokens is faster than computing them at `flops_per_s`."""
        _require_tokens(prefix)
        return flops_per_s * self.kv_bytes / (self.flops + self.square_flops * prefix)

    def shortest_prefix(self, bytes_per_s: float, flops_per_s: float) -> int:
        """Return the shortest prefix, in tokens, that is loaded faster than computed."""
        _require_bandwidth(bytes_per_s)
        flops = flops_per_s * self.kv_bytes / bytes_per_s  # computed while one token's KV cache loads
        return max(0, math.floor((flops - self.flops) / self.square_flops)) + 1


# LLaMA-70B in the paper: 80 layers of width 8,192, eight query heads per KV head, two bytes per value.
PUBLISHED = PrefixCost(kv_bytes=2 * 80 * 8192 * 2 / 8, flops=80 * 22 * 8192**2, square_flops=80 * _ATTENTION * 8192)


def prefix_bytes_per_s(model: PerformanceModel, kv_bytes: int, prefix: int, rest: int = REST) -> float:
    """Return the bandwidth above which loading a prefix of `prefix` tokens is faster than computing it."""
    _require_tokens(prefix)
    saved = saved_s(model, prefix, rest)
    return prefix * kv_bytes / saved if saved > 0 else math.inf


def shortest_prefix(
    model: PerformanceModel, kv_bytes: int, bytes_per_s: float, latency_s: float = 0.0, rest: int = REST
) -> int | None:
    """Return the shortest prefix, in tokens, that is loaded faster than computed; None if no prefix is.

    `latency_s` is the fixed cost of a load. `rest` is the number of prompt tokens after the prefix.
    """
    _require_bandwidth(bytes_per_s)

    def pays(tokens: int) -> bool:
        return latency_s + tokens * kv_bytes / bytes_per_s < saved_s(model, tokens, rest)

    return shortest(pays)


def saved_s(model: PerformanceModel, prefix: int, rest: int = REST) -> float:
    """Return the prefill seconds that a cached prefix saves for a prompt with `rest` more tokens."""
    prompt = prefix + rest
    return model.prefill_s(prompt, prompt * prompt) - reuse_s(model, prompt, prefix, 0.0)


def reuse_s(model: PerformanceModel, prompt: int, reused: int, load_s: float) -> float:
    """Return the prefill seconds of a prompt if its first `reused` tokens load layer by layer in `load_s` seconds."""
    return max(load_s, model.prefill_s(prompt - reused, prompt * prompt - reused * reused))


def _require_bandwidth(bytes_per_s: float) -> None:
    require(bytes_per_s > 0, f"bandwidth must be above 0, not {bytes_per_s:g} bytes per second")


def _require_tokens(prefix: int) -> None:
    require(prefix >= 1, f"a prefix needs at least one token, not {prefix}")


def layer_wise(layers: int, *lanes: float) -> float:
    """Return the total time of parallel lanes (load, compute, store) that each process `layers` layers in order.

    `lanes` has the time of each lane without waiting, for all layers. All layers take equal time. A lane starts a layer
    once it has finished the previous layer and the previous lane has finished this layer:

        Σ lanes / layers + (layers − 1) · max(lanes) / layers

    Leave out lanes without work.
    """
    return (sum(lanes) + (layers - 1) * max(lanes)) / layers
