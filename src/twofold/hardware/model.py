"""Models as planning sees them: sizes that decide memory, compute and what a hand-off must carry."""

import msgspec

from twofold.hardware.quantities import Count, Positive, Text


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The architecture of a decoder-only transformer.

    `weight_bytes` is all that must be resident; `active_parameters` are those a token passes through (fewer
    than `parameters` for a mixture of experts). `kv_latent_dims` is set for latent attention (DeepSeek): the
    compressed vector and its rotary key that are cached per layer instead of keys and values per head.
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
