"""Tokenizer of the model: encodes text and chat messages, and decodes tokens incrementally."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tokenizers
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from twofold.engine.tokenizer import read_tokenizer
from twofold.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Arbitrary text that keeps the decoder from treating the token as the first one.
_ANCHOR = "a"


class TokenBytes:
    """Converts token ids to bytes and to printable names."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder
        kinds = _kinds(json.loads(self._decoder.__getstate__())) if self._decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        self._known: dict[int, bytes | None] = {}

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None for an unknown token."""
        if token_id not in self._known:
            piece = self._tokenizer.id_to_token(token_id)
            self._known[token_id] = None if piece is None else self._decode(piece)
        return self._known[token_id]

    def name_of(self, token_id: int) -> str:
        """Return a token's text, or the token's bytes in hexadecimal if the bytes are not valid UTF-8."""
        raw = self.bytes_of(token_id)
        if raw is None:
            return id_name(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _decode(self, piece: str) -> bytes:
        if piece in self._added:
            return piece.encode()
        if self._byte_level:
            return _byte_level(piece)
        fallback = _BYTE_FALLBACK.fullmatch(piece) if self._byte_fallback else None
        if fallback:
            return bytes.fromhex(fallback[1])
        if self._decoder is None:
            return piece.encode()
        return str(self._decoder.decode([_ANCHOR, piece]))[len(_ANCHOR) :].encode()


def id_name(token_id: int) -> str:
    """Return the printable name of a token without text, such as `token_id:7`."""
    return f"token_id:{token_id}"


def _kinds(decoder: object) -> set[str]:
    if isinstance(decoder, list):
        return set().union(*map(_kinds, decoder))
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.values()))


def _byte_level(piece: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return piece.encode()


# Byte of each character in the alphabet of byte-level BPE (GPT-2).
@cache
def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


T = TypeVar("T")
INLINE_CHARACTERS = 8192  # tokenizing them takes a few ms at most
_TEXT_CHARACTERS = 64  # a text takes as long as this many characters more


async def off_loop(characters: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread if it takes as long as the encoding of a long text."""
    if characters <= INLINE_CHARACTERS:
        return work()
    return await asyncio.to_thread(work)


def load_tokenizer(model_dir: Path | None) -> "TextTokenizer | None":
    """Load the tokenizer from a model directory, or return None if there is none. Raises ModelError on failure."""
    loaded = None if model_dir is None else read_tokenizer(model_dir)
    return None if loaded is None else TextTokenizer(loaded)


class TextTokenizer:
    """Encodes and decodes text with a fast tokenizer of transformers. Thread-safe."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self.backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.bytes = TokenBytes(self.backend)
        # A token covers at most as many characters as its vocabulary entry.
        self.longest_token = max(map(len, self.backend.get_vocab()), default=1)
        self.chat_template = str(tokenizer.chat_template or "")
        self.response_template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
        added = self.backend.get_added_tokens_decoder()
        # llguidance takes every added token in angle brackets for a special one, and no text matches those.
        self._special: dict[str, int] = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self._template_parameters = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        def work() -> list[list[int]]:
            return [self.encode_one(text, add_special_tokens=add_special_tokens) for text in texts]

        weight = sum(len(text) + _TEXT_CHARACTERS for text in texts)
        return await off_loop(weight, work)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        template_kwargs: dict[str, object],
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Render messages with the model's chat template and return the text; raises RequestError on failure."""
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions instead")
        reserved = self._template_parameters.intersection(template_kwargs)
        if reserved:
            name = min(reserved)
            raise RequestError(f"chat_template_kwargs: {name} is reserved", param="chat_template_kwargs")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **template_kwargs,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            # Templates reject unexpected message sequences, such as two user messages in a row.
            raise RequestError(f"messages: rejected by the model's chat template: {error}", param="messages") from error

    def special_parts(self, text: str) -> list[str | int]:
        """Split a text into special tokens, as token ids, and the texts between them."""
        if not self._special:
            return [text] if text else []
        parts: list[str] = re.split(f"({'|'.join(map(re.escape, self._special))})", text)
        return [self._special.get(part, part) for part in parts if part]

    def spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, at the start of a text and after a space."""
        forms = (form for word in words for form in (word, f" {word.lstrip()}"))
        return tuple(dict.fromkeys(tuple(self.encode_one(form, add_special_tokens=False)) for form in forms))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def encode_one(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The fast form computes no offsets, and takes half the time.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)


class Detokenizer:
    """Converts the tokens of one output to text, one token at a time."""

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream: DecodeStream | None = None  # until the first token
        self._token_ids: list[int] = []
        self._emitted = 0  # number of tokens in the emitted pieces
        self._pieces: list[str] = []
        self.characters = 0

    def push(self, token_id: int) -> str:
        """Add a token and return its text, which may be empty."""
        self._token_ids.append(token_id)
        if self._stream is None:
            self._stream = DecodeStream(skip_special_tokens=self._skip)
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # noqa: BLE001 the library raises bare Exceptions
            # The decoder changed text already emitted (some clean up spaces backwards): restart here.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            piece = self._stream.step(self._tokenizer.backend, token_id)
        return self._emit(piece or "")

    def flush(self) -> str:
        """Return the remaining text at the end of the output. Incomplete characters become U+FFFD."""
        if self._emitted == len(self._token_ids):
            return ""
        given = "".join(self._pieces)
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip)
        if whole.startswith(given):
            return self._emit(whole[len(given) :])
        # A run of byte tokens that is not UTF-8 (as in Llama 2) changes characters already emitted: they are kept.
        rest = self._token_ids[self._emitted :]
        return self._emit(self._tokenizer.decode(rest, skip_special_tokens=self._skip))

    def _emit(self, piece: str) -> str:
        if piece:
            self._emitted = len(self._token_ids)
            self._pieces.append(piece)
            self.characters += len(piece)
        return piece
