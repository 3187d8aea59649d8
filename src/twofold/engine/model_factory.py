"""Creates a small but real model: random weights, a trained BPE tokenizer, and the files of a model directory."""

import itertools
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from twofold.engine.torch.loader import no_progress_bars
from twofold.errors import ConfigurationError

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("system", "user", "assistant")
_SPECIAL = (PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES))
_CORPUS_BYTES = 4 * 2**20

_CHAT_TEMPLATE = resources.files(__package__).joinpath("chat_template.jinja")


def train_tokenizer(
    vocab_size: int,
    max_length: int,  # context length of the model
    corpus_characters: int = _CORPUS_BYTES,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens on Python's documentation and standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(corpus_characters), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=_CHAT_TEMPLATE.read_text("utf-8"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _corpus(limit: int) -> Iterator[str]:
    """Yield the first `limit` characters of Python's help topics and standard library."""
    left, stdlib = limit, Path(sysconfig.get_paths()["stdlib"])
    library = (path.read_text(encoding="utf-8", errors="ignore") for path in sorted(stdlib.glob("*.py")))
    for text in itertools.chain((topics[name] for name in sorted(topics)), library):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


_DTYPES = ("float32", "bfloat16", "float16")
_SMALLEST_VOCABULARY = 300  # the 256 bytes, the special tokens and a few merges
# Standard deviation of the logits. With 1 all tokens would be about equally likely.
_LOGIT_SPREAD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions, seed and dtype of a model of the Llama architecture, by default with 31 million parameters."""

    hidden_size: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    vocab_size: int = 8192
    max_model_len: int = 4096
    seed: int = 0
    dtype: str = "float32"

    def check(self) -> None:
        """Raise ConfigurationError for contradictory dimensions, a too small vocabulary, or an unknown dtype."""
        if self.hidden_size % (2 * self.heads):
            raise ConfigurationError(
                f"--hidden-size {self.hidden_size} must be a multiple of twice --heads {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ConfigurationError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")
        if self.vocab_size < _SMALLEST_VOCABULARY:
            raise ConfigurationError(f"--vocab-size must be at least {_SMALLEST_VOCABULARY}")
        if self.dtype not in _DTYPES:
            raise ConfigurationError(f"--dtype {self.dtype} is unknown: choose one of {', '.join(_DTYPES)}")


def create_model(
    directory: Path,
    spec: ModelSpec | None = None,
    *,
    force: bool = False,
    report: Callable[[str], None] = lambda _stage: None,  # gets a description of each step
) -> None:
    """Write a model with random weights, and its tokenizer, to `directory`.

    Raises ConfigurationError for an invalid `spec`, for a non-empty directory without `force`, and if writing fails.
    """
    spec = spec or ModelSpec()
    spec.check()
    _check_directory(directory, force=force)
    report("training a tokenizer on Python's own documentation and library")
    tokenizer = train_tokenizer(spec.vocab_size, spec.max_model_len)
    report("drawing weights")
    model = _draw_model(spec, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    report(f"writing {model.num_parameters() / 1e6:.1f} M parameters to {directory}")
    try:
        with no_progress_bars():
            model.save_pretrained(directory)
        tokenizer.save_pretrained(directory, save_jinja_files=False)
    except OSError as error:
        raise ConfigurationError(f"writing {directory} failed: {error.strerror or error}") from error


def _check_directory(directory: Path, *, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigurationError(f"{directory} is a file: choose a directory")
    if directory.is_dir() and any(directory.iterdir()) and not force:
        raise ConfigurationError(f"{directory} is not empty: choose a new directory, or overwrite with --force")


def _draw_model(spec: ModelSpec, bos: int, eos: int, pad: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.hidden_size * 8 // 3 // 64 * 64 or spec.hidden_size * 2,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.max_model_len,
        # With this scale, layers keep the scale of their input. Larger weights amplify rounding; with much smaller
        # weights, the model repeats a few tokens for any input.
        initializer_range=1.0 / math.sqrt(spec.hidden_size),
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype=spec.dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(_LOGIT_SPREAD)
    model = model.to(getattr(torch, spec.dtype))
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    return model
