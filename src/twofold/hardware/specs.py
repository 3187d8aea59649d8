"""Types of catalog entries: accelerators, machines, links, storage tiers and models."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU type with its memory, peak rates and power."""

    name: Text
    memory_bytes: Count
    memory_bytes_per_s: Positive
    flops_per_s: Positive  # dense bf16 peak
    interconnect_bytes_per_s: Positive  # to the machine's other accelerators, one way (data sheets add both ways)
    tdp_w: Positive
    source: Text
    date: Text


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A server with `count` identical accelerators."""

    name: Text
    accelerator: Accelerator
    count: Count
    network_bytes_per_s: Positive  # of all NICs together, in each direction
    price_per_h: NotNegative  # US dollars; 0: unknown
    tdp_w: Positive  # provisioned power
    idle_w: NotNegative
    source: Text
    date: Text
    power_cap: Share = 1.0  # limit of the accelerators, as a share of their TDP
    power_units: Positive | None = None  # power in the unit of SplitwiseSim's notebooks

    @property
    def memory_bytes(self) -> int:
        return self.count * self.accelerator.memory_bytes


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A network link with its bandwidth in one direction, and a fixed latency per transfer."""

    name: Text
    bytes_per_s: Positive
    latency_s: NotNegative
    source: Text
    date: Text


class StorageTier(msgspec.Struct, frozen=True, kw_only=True):
    """A storage tier for KV caches, such as host memory or disk."""

    name: Text
    price_per_gb_h: NotNegative  # US dollars per 10⁹ bytes
    bytes_per_s: Positive  # read bandwidth of one machine, summed over its accelerators
    source: Text
    date: Text


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions and parameter counts of a decoder-only transformer."""

    name: Text
    layers: Count
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    parameters: Positive
    active_parameters: Positive  # that compute each token: fewer in a mixture of experts
    weight_bytes: Count
    source: Text
    date: Text
    dtype_bytes: Count = 2
    kv_dtype_bytes: Count = 2
    # Size per layer of the compressed vector and the rotary key that latent attention (DeepSeek) caches.
    kv_latent_dims: Count | None = None
    max_context: Count | None = None
    expert_parameters: NotNegative = 0  # of all experts that a router chooses from

    @property
    def kv_bytes_per_token(self) -> int:
        """Size in bytes of the KV cache of one token, in all layers together."""
        per_layer = 2 * self.kv_heads * self.head_dim if self.kv_latent_dims is None else self.kv_latent_dims
        return self.layers * per_layer * self.kv_dtype_bytes
