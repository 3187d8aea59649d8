"""Reads the tokenizer in a model directory."""

from pathlib import Path
from typing import TYPE_CHECKING

from twofold.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def read_tokenizer(model_dir: Path) -> "PreTrainedTokenizerFast | None":
    """Return a model directory's tokenizer, without truncation and padding; None without one. Raises ModelError."""
    fast = (model_dir / "tokenizer.json").is_file()
    if not fast and not any((model_dir / name).is_file() for name in _FILES):
        return None
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(model_dir) if fast else _converted(model_dir)
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{model_dir}: the tokenizer cannot be read: {error}") from error
    loaded.backend_tokenizer.no_truncation()
    loaded.backend_tokenizer.no_padding()
    return loaded


def tokenizer_json(model_dir: Path) -> str:
    """Return the tokenizer of a model directory as JSON. Raises ModelError if there is none."""
    loaded = read_tokenizer(model_dir)
    if loaded is None:
        raise ModelError(f"{model_dir} has no tokenizer")
    return str(loaded.backend_tokenizer.to_str())


def _converted(model_dir: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer  # noqa: PLC0415

    loaded = AutoTokenizer.from_pretrained(model_dir)
    if not loaded.is_fast:
        raise ModelError("it is in an old format; save it as tokenizer.json")
    return loaded
