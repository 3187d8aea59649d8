"""Trains a small byte-level BPE tokenizer on text that every Python installation has."""

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("system", "user", "assistant")
_SPECIAL = (PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES))
_CORPUS_BYTES = 4 * 2**20

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('the roles are system, user and assistant') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def train_tokenizer(
    vocab_size: int, max_length: int, corpus_bytes: int = _CORPUS_BYTES
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, trained on the first `corpus_bytes` of the corpus.

    The same Python release gives the same tokenizer. `max_length` is the context length of its model.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(corpus_bytes), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _corpus(limit: int) -> Iterator[str]:
    """English from the language reference, then code from the standard library, in a fixed order."""
    left = limit
    for text in itertools.chain((topics[name] for name in sorted(topics)), _library()):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _library() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="ignore")
