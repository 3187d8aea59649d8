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

    `interconnect_bytes_per_s` is the bandwidth, in one direction, to the other accelerators of the machine. Data sheets
    give twice this number, because they add both directions.
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
    `tdp_w` is the provisioned power in watts, and `idle_w` is the power in watts without load. The accelerators are
    limited to the share `power_cap` of their TDP (1.0: no limit). `power_units` is the power of the machine in the unit
    of SplitwiseSim's notebooks, or None.
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
    """A type of network link.

    `bytes_per_s` is the bandwidth in one direction, and `latency_s` the fixed time per transfer.
    """

    name: Text
    bytes_per_s: Positive
    latency_s: NotNegative
    source: Text
    date: Text


class StorageTier(msgspec.Struct, frozen=True, kw_only=True):
    """A storage tier for KV caches outside accelerators.

    `price_per_gb_h` is in US dollars; a GB is 10^9 bytes. `bytes_per_s` is the read bandwidth of one machine, summed
    over its accelerators.
    """

    name: Text
    price_per_gb_h: NotNegative
    bytes_per_s: Positive
    source: Text
    date: Text


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer.

    `weight_bytes` is the memory of the weights. `active_parameters` is the number of parameters that compute each
    token: for a mixture of experts, it is less than `parameters`. `kv_latent_dims` is set only for latent attention
    (DeepSeek), which caches a compressed vector and a rotary key per layer, not keys and values per head. It is the
    size of both together.
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
