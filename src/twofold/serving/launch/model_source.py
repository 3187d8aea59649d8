"""Find or download a model, and read its fingerprint, context length and vocabulary size without loading it."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from twofold.errors import ModelError
from twofold.serving.config import EngineConfig

_WEIGHTS = {".safetensors", ".bin"}
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def model_fingerprint(directory: Path) -> str:
    """Return a hash of config.json and of samples of each weights file."""
    found = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for path in sorted(path for path in directory.iterdir() if path.suffix in _WEIGHTS):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            found.update(file.read(1 << 20))
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def loaded_line(directory: Path, took_s: float) -> str:
    """Return a line about the size of a model's weights and how long loading them took."""
    size = sum(path.stat().st_size for path in directory.iterdir() if path.suffix in _WEIGHTS)
    return f"loaded {size / 2**30:.3g} GiB of weights in {took_s:.1f} s"


def find_model(source: str) -> Path:
    """Return the directory of a local model, or download a model from the hub; raises ModelError on failure."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json, so it is not a model directory")
        return path.resolve()
    if path.exists() or path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise ModelError(f"there is no model directory {source}: make a small one with `twofold model create`")
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (slow, and needed for hub ids only)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{source} is not a local directory, and downloading it from the hub failed: {reason}"
        ) from error


class ModelFacts(NamedTuple):
    """Context length and vocabulary size of a model in tokens, a hash of its files, and the workers' devices."""

    max_model_len: int
    vocab_size: int
    fingerprint: str
    device: str = ""


def model_facts(engine: EngineConfig) -> ModelFacts:
    """Read the context length, vocabulary size and fingerprint of `engine.model`. Raises ModelError on failure."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is local
    from transformers import AutoConfig  # noqa: PLC0415  (slow)

    from twofold.engine.model_config import context_length  # noqa: PLC0415  (imports transformers too)

    directory = Path(engine.model)
    try:
        config = AutoConfig.from_pretrained(directory).get_text_config(decoder=True)
        # The torch engine limits LongRoPE models to their original context length, vLLM does not.
        torch = engine.engine == "torch"
        longest = context_length(config, str(directory)) if torch else int(config.max_position_embeddings)
        vocab_size = int(config.vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{directory}: config.json lacks the context length or vocabulary size: {reason}") from error
    return ModelFacts(engine.context(longest), vocab_size, model_fingerprint(directory))
