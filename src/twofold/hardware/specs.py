"""Types of catalog entries: accelerators, machines, links, storage tiers and models."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU type. FLOP/s are dense bf16 peaks, bandwidths are in bytes per second, power is in watts.

    `interconnect_bytes_per_s` is the bandwidth in one direction to the other accelerators of the machine: half of the
    data sheet's value, which adds both directions.
    """

    name: Text
    memory_bytes: Count
    memory_bytes_per_s: Positive
    flops_per_s: Positive
    interconnect_bytes_per_s: Positive
    tdp_w: Positive
    source: Text
    date: Text


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A server with `count` identical accelerators.

    `network_bytes_per_s` is the bandwidth of all NICs together, in each direction. `price_per_h` is in US dollars.
    `tdp_w` is the provisioned power and `idle_w` the draw without load. `power_cap` limits the accelerators to this
    share of their TDP (1.0: uncapped). `power_units` is the machine's power in the units of SplitwiseSim's notebooks,
    if known.
    """

    name: Text
    accelerator: Accelerator
    count: Count
    network_bytes_per_s: Positive
    price_per_h: NotNegative
    tdp_w: Positive
    idle_w: NotNegative
    source: Text
    date: Text
    power_cap: Share = 1.0
    power_units: Positive | None = None

    @property
    def memory_bytes(self) -> int:
        return self.count * self.accelerator.memory_bytes


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A type of network link. Bandwidth is in one direction; `latency_s` is the fixed cost of a transfer."""

    name: Text
    bytes_per_s: Positive
    latency_s: NotNegative
    source: Text
    date: Text


class StorageTier(msgspec.Struct, frozen=True, kw_only=True):
    """A storage tier for KV caches outside accelerators. A GB is 10^9 bytes; prices are in US dollars.

    `bytes_per_s` is the read bandwidth of one machine, summed over its accelerators.
    """

    name: Text
    price_per_gb_h: NotNegative
    bytes_per_s: Positive
    source: Text
    date: Text


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer.

    `weight_bytes` is the memory that weights occupy. `active_parameters` counts the parameters that compute each token
    (fewer than `parameters` for a mixture of experts). `kv_latent_dims` is set for latent attention (DeepSeek): the
    size of the compressed vector and rotary key that are cached per layer instead of keys and values per head.
    """

    name: Text
    layers: Count
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    parameters: Positive
    active_parameters: Positive
    weight_bytes: Count
    source: Text
    date: Text
    dtype_bytes: Count = 2
    kv_dtype_bytes: Count = 2
    kv_latent_dims: Count | None = None
    max_context: Count | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of one token over all layers."""
        per_layer = 2 * self.kv_heads * self.head_dim if self.kv_latent_dims is None else self.kv_latent_dims
        return self.layers * per_layer * self.kv_dtype_bytes
