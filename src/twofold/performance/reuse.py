"""Comparison of loading the KV cache of a prefix with recomputing the prefix (Mooncake, FAST'25).

For a prefix of p tokens and an LLM of hidden size d, the prefill of one layer takes

    a·p²·d + b·p·d² FLOPs

where a is 4, and b is 22 for LLaMA-70B. With compute of G FLOP/s and a link of B bytes per second, loading is
faster than recomputing if

    B / G > 2·d·s / (gqa·(a·p·d + b·d²))

where s is the number of bytes per value, and gqa is the number of query heads per KV head.
"""

import math

import msgspec

from twofold.errors import require
from twofold.hardware.specs import Model
from twofold.performance.base import PerformanceModel
from twofold.performance.transfer import shortest

# Mooncake counts `l·(a·p²·d + b·p·d²)` FLOPs for the prefill of p tokens in l layers, and `2·p·l·d·s / gqa` bytes for
# their KV cache; a = 4 is for full-square attention, and b = 22 for the matrices of LLaMA-70B. The limit falls as p
# grows, so longer prefixes are worth loading even over slower links. `PrefixCost` computes this limit from FLOPs and
# bytes at peak performance. `prefix_bytes_per_s` and `shortest_prefix` use a performance model, which includes the
# fixed cost of a prefill. Reuse does not save this cost.

REST = 512  # default number of prompt tokens after the prefix
_ATTENTION = 4  # FLOPs per token pair and head value: scores and weighted sum


class PrefixCost(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes to load a cached prefix, and FLOPs to compute it instead."""

    kv_bytes: float  # per token
    flops: float  # per token
    square_flops: float  # per squared number of tokens

    @classmethod
    def of(cls, model: Model) -> "PrefixCost":
        """Calculate the bytes and FLOPs of a prefix for an LLM of the catalog."""
        return cls(
            kv_bytes=model.kv_bytes_per_token,
            flops=2 * model.active_parameters,
            square_flops=_ATTENTION * model.layers * model.heads * model.head_dim,
        )

    def bytes_per_s(self, prefix: int, flops_per_s: float) -> float:
        """Return the bandwidth in bytes/s above which loading a prefix is faster than computing it."""
        _require_tokens(prefix)
        return flops_per_s * self.kv_bytes / (self.flops + self.square_flops * prefix)


def prefix_bytes_per_s(model: PerformanceModel, kv_bytes: int, prefix: int, rest: int = REST) -> float:
    """Return the bandwidth in bytes/s above which loading a prefix is faster than computing it."""
    _require_tokens(prefix)
    saved = saved_s(model, prefix, rest)  # `rest` prompt tokens follow the prefix
    return prefix * kv_bytes / saved if saved > 0 else math.inf


def shortest_prefix(
    model: PerformanceModel, kv_bytes: int, bytes_per_s: float, latency_s: float = 0.0, rest: int = REST
) -> int | None:
    """Return the shortest prefix, in tokens, whose KV cache loads faster than it is computed, or None."""
    require(bytes_per_s > 0, f"bandwidth must be above 0, not {bytes_per_s:g} bytes per second")

    def pays(tokens: int) -> bool:
        # `latency_s` is the fixed time of a load, and `kv_bytes` the size of KV per token.
        return latency_s + tokens * kv_bytes / bytes_per_s < saved_s(model, tokens, rest)

    return shortest(pays)


def saved_s(model: PerformanceModel, prefix: int, rest: int = REST) -> float:
    """Return the prefill seconds that a cached prefix of `prefix` tokens saves."""
    prompt = prefix + rest  # tokens
    return model.prefill_s(prompt, prompt * prompt) - reuse_s(model, prompt, prefix, 0.0)


def reuse_s(model: PerformanceModel, prompt: int, reused: int, load_s: float) -> float:
    """Return the prefill time (s) of a prompt if `reused` tokens are loaded while the rest is computed."""
    # The load overlaps with computation layer by layer.
    return max(load_s, model.prefill_s(prompt - reused, prompt * prompt - reused * reused))


def _require_tokens(prefix: int) -> None:
    require(prefix >= 1, f"a prefix needs at least one token, not {prefix}")


def layer_wise(layers: int, *lanes: float) -> float:
    """Return the total time to load, compute and store `layers` layers as a pipeline (Mooncake, section 5.2)."""
    # `lanes` has the total time of each lane (load, compute, store). A lane starts layer i after its layer i − 1 and
    # after layer i of the previous lane. All layers of a lane take equal time.
    return (sum(lanes) + (layers - 1) * max(lanes)) / layers
