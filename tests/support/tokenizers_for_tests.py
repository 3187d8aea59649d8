"""Small real tokenizers: byte-level BPE as in GPT-2, and BPE with byte fallback as in Llama 2."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from twofold.serving.gateway.tokenizer import TextTokenizer, load_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Prefill reads the whole prompt at once, decode writes one token at a time.",
    "Grüße aus München, où le café est très bon.",
    "こんにちは世界 😀 你好",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('the first message cannot be the assistant\\'s') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if shout %}!{% endif %}"
)


# As the models of the family hermes have it.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}"
    "<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@cache
def tool_caller() -> TextTokenizer:
    """Return a byte-level tokenizer with the chat template of a model that calls tools."""
    return _load(_save(_byte_level(), chat_template=TOOL_TEMPLATE))


@cache
def byte_level_dir() -> Path:
    """Return a model directory with a byte-level tokenizer."""
    return _save(_byte_level(), chat_template=CHAT_TEMPLATE)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


@cache
def byte_fallback_dir() -> Path:
    """Return a model directory with a byte-fallback tokenizer."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ("▁", "▁the", "▁quick", "a", "b", "c", "ü", "世", "▁dog", ".", "e", "▁T"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106 a token
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return _save(tokenizer, chat_template=None)


@cache
def byte_level() -> TextTokenizer:
    return _load(byte_level_dir())


@cache
def byte_level_with(*tokens: str, special: bool) -> TextTokenizer:
    """Return a byte-level tokenizer with added tokens, special or not."""
    tokenizer = _byte_level()
    added = [AddedToken(token, normalized=False, special=special) for token in tokens]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return _load(_save(tokenizer, chat_template=CHAT_TEMPLATE))


@cache
def byte_fallback() -> TextTokenizer:
    return _load(byte_fallback_dir())


def _load(model_dir: Path) -> TextTokenizer:
    loaded = load_tokenizer(model_dir)
    assert loaded is not None
    return loaded


def _save(tokenizer: Tokenizer, chat_template: str | None) -> Path:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # noqa: S106
    wrapped.chat_template = chat_template
    model_dir = Path(tempfile.mkdtemp(prefix="twofold-tokenizer-"))
    atexit.register(shutil.rmtree, model_dir, ignore_errors=True)
    wrapped.save_pretrained(model_dir)
    return model_dir
