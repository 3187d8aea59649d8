"""Keeps transformers' progress bars off the terminal; they would also leave a thread behind.

Loads a decoder-only model of `transformers` and finds out what its KV cache must hold.
"""

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
from twofold.engine.torch.batch import register
from twofold.engine.torch.probe import probe_layers
from twofold.errors import ModelError


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """No progress bars of transformers inside; afterwards they are as they were."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, and what others need to know about it."""

    model: PreTrainedModel
    layers: tuple[LayerShape, ...]
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    dtype_name: str
    itemsize: int
    windows: tuple[int | None, ...]  # how many positions each layer sees back; None: all of them
    # Where ranks share a model: which of its layers is the first here, and whether tokens come from here.
    first_layer: int = 0
    samples: bool = True

    def layout(self, block_size: int) -> KvLayout:
        """The KV cache of this model in blocks of `block_size` tokens."""
        return KvLayout(
            layers=self.layers, block_size=block_size, dtype=self.dtype_name, itemsize=self.itemsize
        )

    def to(self, device: torch.device | str) -> "LoadedModel":
        """Move the weights to `device`, in place; returns self."""
        self.model.to(device)
        return self


def load_model(path_or_id: str | Path, *, dtype: str = "auto", seed: int | None = None) -> LoadedModel:
    """Load a model on the CPU, ready to be moved and run.

    `path_or_id` is a local directory (then the network is not touched) or a hub id. `dtype` is `auto` (that of
    the checkpoint), `float32`, `bfloat16` or `float16`. With `seed` the weights are drawn at random instead of
    read, so that the speed of an architecture can be measured from its config.json alone.

    The process may fork afterwards if it called `torch.set_num_threads(1)` before: nothing here starts threads
    that outlive the call, or touches an accelerator.

    Raises ModelError when there is no such model, when its files are incomplete or unreadable, and when it
    computes something that a paged KV cache cannot hold or that this engine does not compute.
    """
    register()
    name = str(path_or_id)
    config = _read_config(name)
    torch_dtype = _torch_dtype(dtype)
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model, and only decoder-only models can be served")
    get_weights = _read_weights if seed is None else partial(_draw_weights, seed=seed)
    model = get_weights(name, config, torch_dtype).eval().requires_grad_(requires_grad=False)
    text = config.get_text_config(decoder=True)
    probed = probe_layers(model, name)
    return LoadedModel(
        model=model,
        layers=tuple(layer.shape for layer in probed.layers),
        eos_token_ids=eos_token_ids(
            getattr(model.generation_config, "eos_token_id", None), text.eos_token_id
        ),
        max_model_len=probed.max_model_len,
        vocab_size=int(text.vocab_size),
        dtype_name=str(probed.dtype).removeprefix("torch."),
        itemsize=probed.dtype.itemsize,
        windows=tuple(layer.window for layer in probed.layers),
    )


def _torch_dtype(name: str) -> torch.dtype | None:
    if name not in _DTYPES:
        raise ModelError(f"--dtype {name} is unknown: it is one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _read_config(name: str) -> PreTrainedConfig:
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so it is not a model directory")
    is_path = path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if is_path and not path.is_dir():
        raise ModelError(f"there is no model directory {name}: make a small one with `twofold model create`")
    with _told_as(f"{name}: its config.json cannot be used"):
        return AutoConfig.from_pretrained(path if is_path else name, local_files_only=is_path)


def _read_weights(name: str, config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """Raises ModelError also where transformers would only warn: what it draws at random is no model."""
    path = Path(name).expanduser()
    with _told_as(f"{name}: its weights cannot be loaded"), no_progress_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            path if path.is_dir() else name,
            config=copy.deepcopy(config),
            dtype="auto" if dtype is None else dtype,
            attn_implementation="eager",  # until the probe has seen that it can be another
            local_files_only=path.is_dir(),
            output_loading_info=True,
        )
    missing = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{name}: its weights lack {missing[0]}{others}, or have it in another shape")
    return model


def _draw_weights(
    name: str, config: PreTrainedConfig, dtype: torch.dtype | None, seed: int
) -> PreTrainedModel:
    """Leaves torch's global random state as it was."""
    with _told_as(f"{name}: no such model can be made"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype or config.dtype or torch.float32, attn_implementation="eager"
        )


@contextmanager
def _told_as(what: str) -> Iterator[None]:
    """Turn whatever the libraries raise about a model's files (their kinds vary) into one sentence."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{what}: {reason}") from error
