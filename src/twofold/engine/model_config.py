"""Reads EOS tokens and context length from a model's configuration files."""

from typing import Any

from transformers import PreTrainedConfig

from twofold.errors import ModelError


def eos_token_ids(*given: object) -> tuple[int, ...]:
    """Return the end-of-sequence token ids from the first argument that is a token id or a list of token ids."""
    for each in given:
        if isinstance(each, int):
            return (each,)
        if isinstance(each, (list, tuple)):
            return tuple(int(token) for token in each)
    return ()


# Names of the context length; some configurations do not map theirs to `max_position_embeddings`.
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


def context_length(config: PreTrainedConfig, name: str) -> int:
    """Return the context length of a model in tokens. Raises ModelError if its config.json has none."""
    lengths = [int(value) for key in _NAMES if (value := getattr(config, key, None))]
    if not lengths:
        raise ModelError(f"{name}: its config.json has no context length ({_NAMES[0]})")
    rope = getattr(config, "rope_parameters", None) or {}
    # Beyond the original length, LongRoPE would change the rotary embeddings of all sequences in the batch.
    return min([lengths[0], *_longrope_lengths(rope)])


def _longrope_lengths(rope: dict[str, Any]) -> list[int]:
    """List the original context lengths in a model's LongRoPE parameters."""
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return [int(s["original_max_position_embeddings"]) for s in sets if s.get("rope_type") == "longrope"]
