"""The ids that end an output.

How long a sequence may get, by a model's configuration.
"""

from typing import Any

from transformers import PreTrainedConfig

from twofold.errors import ModelError


def eos_token_ids(*given: object) -> tuple[int, ...]:
    """Those of the first that names any: generation_config.json's go before config.json's, as in transformers."""
    for each in given:
        if isinstance(each, int):
            return (each,)
        if isinstance(each, (list, tuple)):
            return tuple(int(token) for token in each)
    return ()


# Configurations that do not map their own name to `max_position_embeddings` use one of the others.
_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)


def context_length(config: PreTrainedConfig, name: str) -> int:
    """The most tokens of a sequence, prompt and output together; raises ModelError when the config has none.

    LongRoPE turns every position differently as soon as one position of a batch is past the original length, so
    a cache filled before would no longer fit and one sequence would change its neighbours: it stops there.
    """
    lengths = [int(value) for key in _NAMES if (value := getattr(config, key, None))]
    if not lengths:
        raise ModelError(f"{name}: its config.json does not say how many positions it has ({_NAMES[0]})")
    rope = getattr(config, "rope_parameters", None) or {}
    return min([lengths[0], *_longrope_lengths(rope)])


def _longrope_lengths(rope: dict[str, Any]) -> list[int]:
    """Original lengths of all LongRoPE parameter sets; a config has one set, or one for each kind of layer."""
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return [int(s["original_max_position_embeddings"]) for s in sets if s.get("rope_type") == "longrope"]
