"""The attention function that models call, layer by layer, with a packed batch over the paged KV cache."""

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AttentionInterface

from twofold.engine.torch.kernels import AttentionInputs, AttentionScoring

if TYPE_CHECKING:
    from twofold.engine.torch.batch import PackedBatch

PAGED = "twofold_paged"


def register() -> None:
    """Make `attn_implementation="twofold_paged"` known to transformers. Harmless to repeat."""
    AttentionInterface.register(PAGED, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  (always None: the batch knows what each token sees)
    *,
    twofold_batch: "PackedBatch",
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_ignored: object,  # `probe` refuses models whose further arguments matter, and reads windows from masks
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into the pool, then attend to what each token may see.

    `query` is [1, heads, tokens, key_dim], `key` and `value` are [1, kv_heads, tokens, dim]; the result is
    [1, tokens, heads, value_dim], as transformers expects. The batch's hooks are called in between.
    """
    batch = twofold_batch
    layer = int(module.layer_idx) - batch.first_layer  # type: ignore[arg-type]
    batch.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    batch.hooks.written(batch.first_layer + layer)
    call = AttentionInputs(layer, query, key, value, AttentionScoring(scaling, softcap, s_aux))
    pieces = [part.attend(call) for part in batch.parts(layer)]
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return packed.unsqueeze(0), None
