"""Reuse or recompute: find out when loading the KV cache of a prefix is faster than computing it again.

Mooncake (FAST'25) counts `l·(a·p²·d + b·p·d²)` FLOPs for the prefill of p tokens, and `2·p·l·d·s / gqa` bytes for their
KV cache. The LLM has l layers of width d, s bytes per value and gqa query heads per KV head; a = 4 is for full-square
attention, and b = 22 for the matrices of LLaMA-70B. At G FLOP/s and B bytes per second, loading is faster if

    B / G > 2·d·s / (gqa·(a·p·d + b·d²))

The right-hand side falls as p grows, so longer prefixes are worth loading even over slower links. `PrefixCost` computes
this limit from FLOPs and bytes at peak performance. `prefix_bytes_per_s` and `shortest_prefix` use a performance model,
which includes the fixed cost of a prefill. Reuse does not save this cost.

Loads, computation and stores of layers run in parallel (Mooncake, arXiv 2407.00079, section 5.2): a layer is computed
once it is loaded, and stored once it is computed.
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
    """Cost of a prefix of n tokens: `kv_bytes`·n bytes of KV cache, and `flops`·n + `square_flops`·n² FLOPs."""

    kv_bytes: float
    flops: float
    square_flops: float

    @classmethod
    def of(cls, model: Model) -> "PrefixCost":
        """Return the cost for an LLM of the catalog: 2 FLOPs per token and active parameter, plus attention."""
        return cls(
            kv_bytes=model.kv_bytes_per_token,
            flops=2 * model.active_parameters,
            square_flops=_ATTENTION * model.layers * model.heads * model.head_dim,
        )

    def bytes_per_s(self, prefix: int, flops_per_s: float) -> float:
        """Return the bytes/s above which loading `prefix` tokens is faster than computing them at `flops_per_s`."""
        _require_tokens(prefix)
        return flops_per_s * self.kv_bytes / (self.flops + self.square_flops * prefix)

    def shortest_prefix(self, bytes_per_s: float, flops_per_s: float) -> int:
        """Return the shortest prefix, in tokens, whose KV cache loads faster than it is computed."""
        _require_bandwidth(bytes_per_s)
        flops = flops_per_s * self.kv_bytes / bytes_per_s  # computed while one token's KV cache loads
        return max(0, math.floor((flops - self.flops) / self.square_flops)) + 1


# LLaMA-70B in the paper: 80 layers of width 8,192, eight query heads per KV head, two bytes per value.
PUBLISHED = PrefixCost(kv_bytes=2 * 80 * 8192 * 2 / 8, flops=80 * 22 * 8192**2, square_flops=80 * _ATTENTION * 8192)


def prefix_bytes_per_s(model: PerformanceModel, kv_bytes: int, prefix: int, rest: int = REST) -> float:
    """Return the bandwidth in bytes/s above which loading a prefix of `prefix` tokens is faster than computing it.

    `kv_bytes` is the size of the KV cache per token. `rest` is the number of prompt tokens after the prefix.
    """
    _require_tokens(prefix)
    saved = saved_s(model, prefix, rest)
    return prefix * kv_bytes / saved if saved > 0 else math.inf


def shortest_prefix(
    model: PerformanceModel, kv_bytes: int, bytes_per_s: float, latency_s: float = 0.0, rest: int = REST
) -> int | None:
    """Return the shortest prefix, in tokens, whose KV cache loads faster than it is computed, or None.

    `latency_s` is the fixed time of a load. `rest` is the number of prompt tokens after the prefix.
    """
    _require_bandwidth(bytes_per_s)

    def pays(tokens: int) -> bool:
        return latency_s + tokens * kv_bytes / bytes_per_s < saved_s(model, tokens, rest)

    return shortest(pays)


def saved_s(model: PerformanceModel, prefix: int, rest: int = REST) -> float:
    """Return the prefill seconds that a cached prefix saves if `rest` more prompt tokens follow the prefix."""
    prompt = prefix + rest
    return model.prefill_s(prompt, prompt * prompt) - reuse_s(model, prompt, prefix, 0.0)


def reuse_s(model: PerformanceModel, prompt: int, reused: int, load_s: float) -> float:
    """Return the prefill seconds of a prompt of `prompt` tokens if its first `reused` tokens are loaded, not computed.

    The load takes `load_s` seconds and overlaps with computation layer by layer.
    """
    return max(load_s, model.prefill_s(prompt - reused, prompt * prompt - reused * reused))


def _require_bandwidth(bytes_per_s: float) -> None:
    require(bytes_per_s > 0, f"bandwidth must be above 0, not {bytes_per_s:g} bytes per second")


def _require_tokens(prefix: int) -> None:
    require(prefix >= 1, f"a prefix needs at least one token, not {prefix}")


def layer_wise(layers: int, *lanes: float) -> float:
    """Return the total time of parallel lanes (load, compute, store), each of which processes `layers` layers in order.

    `lanes` has the total time of each lane with work. A lane starts layer i after its layer i − 1 and after layer i of
    the previous lane. All layers of a lane take equal time, so the total time is

        Σ lanes / layers + (layers − 1) · max(lanes) / layers
    """
    return (sum(lanes) + (layers - 1) * max(lanes)) / layers
