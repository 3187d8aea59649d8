"""Reads from a model's own mask rule how far back its tokens see."""

from collections.abc import Callable

import torch

from twofold.errors import ModelError

# (batch, head, query position, key position) → whether that query sees that key; all index tensors of one shape.
Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def read_window(visible: Visible, max_model_len: int, refuse: Callable[[str], ModelError]) -> int | None:
    """How many positions a token sees, itself included; None when all up to `max_model_len`.

    Raises what `refuse` makes of the reason when the rule is not "the last so many positions".
    """
    last = max_model_len - 1
    try:
        window = int(_row(visible, last, max_model_len).sum())
        samples = {0, 1, last // 3, last // 2, last - 1, last, window - 1, window, window + 1}
        for query in sorted(q for q in samples if 0 <= q <= last):
            keys = torch.arange(max_model_len)
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(_row(visible, query, max_model_len), expected):
                raise refuse("its attention mask is neither causal nor a sliding window")
    except (IndexError, RuntimeError) as error:  # a rule over tensors that exist for one batch only
        raise refuse(f"the rule of its attention mask cannot be read ({error})") from error
    return None if window >= max_model_len else window


def _row(visible: Visible, query: int, keys: int) -> torch.Tensor:
    zeros = torch.zeros(keys, dtype=torch.long)
    return visible(zeros, zeros, torch.full((keys,), query), torch.arange(keys)).expand(keys)
