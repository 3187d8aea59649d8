"""Types of catalog entries: accelerators, machines, links, storage tiers and models."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU type. FLOP/s are dense bf16 peaks, bandwidths are in bytes per second, and power is in watts.

    `interconnect_bytes_per_s` is the one-way bandwidth to the machine's other accelerators. Data sheets add both ways.
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

    `network_bytes_per_s` is for all NICs together, in each direction. `price_per_h` is in US dollars. `tdp_w` is the
    provisioned power and `idle_w` the idle power, in watts. `power_cap` limits the accelerators to a share of their
    TDP. `power_units` is the machine's power in the unit of SplitwiseSim's notebooks.
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
    """A type of network link: bandwidth in one direction, and a fixed time `latency_s` per transfer."""

    name: Text
    bytes_per_s: Positive
    latency_s: NotNegative
    source: Text
    date: Text


class StorageTier(msgspec.Struct, frozen=True, kw_only=True):
    """A storage tier for KV caches outside accelerators. `price_per_gb_h` is in US dollars per 10^9 bytes.

    `bytes_per_s` is the read bandwidth of one machine, summed over its accelerators.
    """

    name: Text
    price_per_gb_h: NotNegative
    bytes_per_s: Positive
    source: Text
    date: Text


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer.

    `weight_bytes` is the memory of the weights. `active_parameters` is the number of parameters that compute each
    token. It is less than `parameters` for a mixture of experts. `kv_latent_dims` is the size of the compressed vector
    and the rotary key that latent attention (DeepSeek) caches per layer, or None for keys and values per head.
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
        """Size in bytes of the KV cache of one token, in all layers together."""
        per_layer = 2 * self.kv_heads * self.head_dim if self.kv_latent_dims is None else self.kv_latent_dims
        return self.layers * per_layer * self.kv_dtype_bytes
