"""Loads a decoder-only model of `transformers` and determines its KV cache layout."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.model_config import eos_token_ids
from twofold.engine.torch.probe import probe_layers
from twofold.errors import ModelError


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars inside a `with` statement."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()  # they would leave a thread running
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, with its KV layout, EOS ids and context length."""

    model: PreTrainedModel
    layers: tuple[LayerShape, ...]
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    dtype_name: str
    itemsize: int
    windows: tuple[int | None, ...]  # sliding window of each layer; None: full attention
    # If this is the part of one of several ranks: its first layer, and whether the rank samples.
    first_layer: int = 0
    samples: bool = True

    def layout(self, block_size: int) -> KvLayout:
        """Return the layout of the model's KV cache for blocks of `block_size` tokens."""
        return KvLayout(layers=self.layers, block_size=block_size, dtype=self.dtype_name, itemsize=self.itemsize)

    def to(self, device: torch.device | str) -> "LoadedModel":
        """Move the weights to `device` in place, and return self."""
        self.model.to(device)
        return self


def load_model(path_or_id: str | Path, *, dtype: str = "auto", seed: int | None = None) -> LoadedModel:
    """Load a transformers model from a local directory or by hub id, on the CPU.

    With `seed`, the weights are random. Raises ModelError if the model cannot be loaded or served.
    """
    # This initializes no accelerator, and starts no threads after `torch.set_num_threads(1)`, so the process may fork.
    name = str(path_or_id)
    config = _read_config(name)
    if dtype not in _DTYPES:
        raise ModelError(f"--dtype {dtype} is unknown: choose one of {', '.join(_DTYPES)}")
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model, but only decoder-only models can be served")
    get_weights = _read_weights if seed is None else partial(_draw_weights, seed=seed)
    model = get_weights(name, config, _DTYPES[dtype]).eval().requires_grad_(requires_grad=False)
    text = config.get_text_config(decoder=True)
    probed = probe_layers(model, name)
    return LoadedModel(
        model=model,
        layers=tuple(layer.shape for layer in probed.layers),
        eos_token_ids=eos_token_ids(getattr(model.generation_config, "eos_token_id", None), text.eos_token_id),
        max_model_len=probed.max_model_len,
        vocab_size=int(text.vocab_size),
        dtype_name=str(probed.dtype).removeprefix("torch."),
        itemsize=probed.dtype.itemsize,
        windows=tuple(layer.window for layer in probed.layers),
    )


def _read_config(name: str) -> PreTrainedConfig:
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so it is not a model directory")
    is_path = path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if is_path and not path.is_dir():
        raise ModelError(f"there is no model directory {name}: create a small model with `twofold model create`")
    with _model_errors(f"{name}: its config.json cannot be used"):
        return AutoConfig.from_pretrained(path if is_path else name, local_files_only=is_path)


def _read_weights(name: str, config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load the weights. Raises ModelError if some are missing."""
    path = Path(name).expanduser()
    with _model_errors(f"{name}: its weights cannot be loaded"), no_progress_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            path if path.is_dir() else name,
            config=copy.deepcopy(config),
            dtype="auto" if dtype is None else dtype,
            attn_implementation="eager",  # until the probe has checked paged attention
            local_files_only=path.is_dir(),
            output_loading_info=True,
        )
    # transformers would replace missing weights by random numbers.
    missing = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{name}: its weights lack {missing[0]}{others}, or it has another shape")
    return model


def _draw_weights(name: str, config: PreTrainedConfig, dtype: torch.dtype | None, seed: int) -> PreTrainedModel:
    """Create the model with random weights."""
    with _model_errors(f"{name}: no such model can be made"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype or config.dtype or torch.float32, attn_implementation="eager"
        )


@contextmanager
def _model_errors(what: str) -> Iterator[None]:
    """Convert exceptions inside a `with` statement to ModelErrors."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{what}: {reason}") from error
