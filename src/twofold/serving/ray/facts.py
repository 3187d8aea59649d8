"""What the gateway has to know of a model, without loading it."""

import os
from pathlib import Path
from typing import NamedTuple

from twofold.errors import ModelError
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

    from twofold.engine.torch.limits import context_length  # noqa: PLC0415  (imports transformers too)

    directory = Path(engine.model)
    try:
        config = AutoConfig.from_pretrained(directory).get_text_config(decoder=True)
        # vLLM serves all positions that there are.
        ours = engine.engine == "torch"
        longest = context_length(config, str(directory)) if ours else int(config.max_position_embeddings)
        vocab_size = int(config.vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{directory}: config.json does not say what is served: {reason}") from error
    return ModelFacts(engine.context(longest), vocab_size, model_name(directory))
