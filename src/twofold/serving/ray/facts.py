"""What the gateway has to know of a model, without loading it."""

import os
from pathlib import Path
from typing import NamedTuple

from twofold.errors import ConfigurationError, ModelError
from twofold.serving.config import EngineConfig
from twofold.serving.model_source import model_name


class ModelFacts(NamedTuple):
    """Sizes in tokens, and the name that is the same wherever the model is the same."""

    max_model_len: int
    vocab_size: int
    name: str


def model_facts(engine: EngineConfig) -> ModelFacts:
    """Of the model in the directory `engine.model`; raises ModelError or ConfigurationError."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it is here
    from transformers import AutoConfig  # noqa: PLC0415  (slow)

    directory = Path(engine.model)
    try:
        config = AutoConfig.from_pretrained(directory).get_text_config(decoder=True)
        longest, vocab_size = int(config.max_position_embeddings), int(config.vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{directory}: config.json does not say what is served: {reason}") from error
    if engine.max_model_len is not None and engine.max_model_len > longest:
        raise ConfigurationError(
            f"--max-model-len {engine.max_model_len:,} is more than the model's {longest:,}"
        )
    return ModelFacts(engine.max_model_len or longest, vocab_size, model_name(directory))
