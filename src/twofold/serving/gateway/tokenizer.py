"""The model's own tokenizer: text and chat messages to token ids, and the pieces that go back to text."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tokenizers
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from twofold.errors import ModelError, RequestError
from twofold.serving.gateway.token_bytes import TokenBytes

if TYPE_CHECKING:  # it takes seconds, and a service without a tokenizer does without it
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(model_dir: Path) -> "TextTokenizer | None":
    """The tokenizer of a model directory; None where it has none. Raises ModelError on a broken one."""
    fast = (model_dir / "tokenizer.json").is_file()
    if not fast and not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(model_dir) if fast else _converted(model_dir)
    except Exception as error:  # the library raises bare Exceptions, and its own kinds vary by version
        raise ModelError(f"{model_dir}: the tokenizer cannot be read: {error}") from error
    return TextTokenizer(loaded)


def _converted(model_dir: Path) -> "PreTrainedTokenizerFast":
    """A tokenizer in an older format. Kept apart because AutoTokenizer imports torch."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    loaded = AutoTokenizer.from_pretrained(model_dir)
    if not loaded.is_fast:
        raise ModelError("it is in an old format; save it as tokenizer.json")
    return loaded


class TextTokenizer:
    """Encodes and decodes with the library's fast tokenizer; safe to call from several threads."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, inline_characters: int = 8192) -> None:
        """More text than `inline_characters` at once is encoded in a thread, so that it stalls no stream."""
        self._tokenizer = tokenizer
        self._inline_characters = inline_characters
        self.backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.bytes = TokenBytes(self.backend)
        # No token covers more characters of a text than its entry in the vocabulary has.
        self.longest_token = max(map(len, self.backend.get_vocab()), default=1)
        self._template_parameters = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        def work() -> list[list[int]]:
            return [self._encode(text, add_special_tokens) for text in texts]

        return await self._off_loop(sum(map(len, texts)), work)

    async def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        template_kwargs: dict[str, object],
    ) -> list[int]:
        """Render the messages with the model's chat template and encode them; raises RequestError."""

        def work() -> list[int]:
            text = self.render_chat(
                messages, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
            )
            return self._encode(text, add_special_tokens)

        return await self._off_loop(sum(len(message["content"]) for message in messages), work)

    def render_chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        template_kwargs: dict[str, object],
    ) -> str:
        """The prompt text the model's chat template makes of `messages`; raises RequestError."""
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions instead")
        reserved = self._template_parameters.intersection(template_kwargs)
        if reserved:
            name = min(reserved)
            raise RequestError(
                f"chat_template_kwargs: {name} is not the template's to set", param="chat_template_kwargs"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **template_kwargs,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            # A template refuses what its model was not trained on, such as two user messages in a row.
            raise RequestError(
                f"messages: the model's chat template refused them: {error}", param="messages"
            ) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def stream(self, *, skip_special_tokens: bool) -> DecodeStream:
        return DecodeStream(skip_special_tokens=skip_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    async def _off_loop(self, characters: int, work: Callable[[], T]) -> T:
        if characters <= self._inline_characters:
            return work()
        return await asyncio.to_thread(work)
