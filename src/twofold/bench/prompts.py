"""Generation of prompts of a given length; requests with common prefix blocks get prompts with a common prefix."""

from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from twofold.request import BlockKey, Request
from twofold.workload.blocks import BLOCK_TOKENS

# Short, common words: with a leading space, each is one token in most tokenizers.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community "
    "name president team minute idea body information back parent face level office door health person "
    "art war history party result change morning reason research girl guy moment air teacher force "
    "education "
)
WORDS = tuple(_TEXT.split())


def unlike_lengths(mean: int, count: int, longest: int) -> list[int]:
    """Return `count` prompt lengths, the last 16 times the first, with the mean `mean`, each clipped to `longest`.

    Engines may run a batch with equal contexts faster than a batch with unequal contexts.
    """
    if count == 1:
        return [min(mean, longest)]
    steps = [16 ** (number / (count - 1)) for number in range(count)]
    return [min(longest, max(1, round(mean * count * step / sum(steps)))) for step in steps]


Prompt = list[int] | str | list[Any]  # token ids, text, or the messages of a chat


class PromptForm(StrEnum):
    """Form in which prompts are sent: token ids or text."""

    TOKENS = "tokens"  # a list of token ids with the exact length
    TEXT = "text"  # words; about one token each, depending on the endpoint's tokenizer


class PromptMaker(msgspec.Struct, frozen=True, kw_only=True):
    """Generator of random prompts. A prompt depends only on the settings, such as the seed, and on the request."""

    form: PromptForm = PromptForm.TOKENS
    seed: int = 0
    salt: str = ""  # generators with different salts have only the first `shared_prefix` tokens of prompts in common
    shared_prefix: int = 0
    # Token ids are at least `lowest` and less than `vocabulary`. The defaults fit every large vocabulary and avoid
    # special tokens.
    lowest: int = 256
    vocabulary: int = 1024
    block_tokens: int = BLOCK_TOKENS  # of a prefix block

    def prompt(self, request: Request) -> list[int] | str:
        """Return the prompt of `request` as token ids or as text."""
        if self.form is PromptForm.TOKENS:
            return self.token_ids(request)
        return " ".join(WORDS[number] for number in self._draw(request, 0, len(WORDS)).tolist())

    def token_ids(self, request: Request) -> list[int]:
        ids: list[int] = self._draw(request, self.lowest, self.vocabulary).tolist()
        return ids

    def continuation(self, request: Request, count: int) -> list[int] | str:
        """Return the `count` new tokens of a later turn of a session, as token ids or as text."""
        stream = self._stream("request", request.id)
        if self.form is PromptForm.TEXT:
            return " ".join(WORDS[number] for number in stream.integers(0, len(WORDS), count).tolist())
        ids: list[int] = stream.integers(self.lowest, self.vocabulary, count).tolist()
        return ids

    def _draw(self, request: Request, low: int, high: int) -> npt.NDArray[np.int64]:
        wanted = request.prompt_tokens
        blocks = request.prefix_blocks[: -(-wanted // self.block_tokens)]
        parts = [self._stream("prefix", "", "").integers(low, high, self.shared_prefix)] if self.shared_prefix else []
        parts += [self._stream("block", _name(block)).integers(low, high, self.block_tokens) for block in blocks]
        shared = request.shared_tokens
        if shared:  # the beginning that all sessions have in common
            parts.append(self._stream("shared", "").integers(low, high, shared))
        rest = wanted - sum(map(len, parts))
        if rest > 0:
            parts.append(self._stream("request", request.id).integers(low, high, rest))
        return np.concatenate(parts)[:wanted] if parts else np.empty(0, dtype=np.int64)

    def _stream(self, kind: str, name: int | str, salt: str | None = None) -> np.random.Generator:
        key = f"{self.salt if salt is None else salt}{self.seed}/{kind}/{name}"
        digest = blake2b(key.encode(), digest_size=16).digest()
        return np.random.default_rng(int.from_bytes(digest))


def _name(block: BlockKey) -> int | str:
    return block if isinstance(block, int) else block.hex()


def token_range(vocabulary: int | None) -> tuple[int, int]:
    """Return the half-open range of token ids for random prompts, given the vocabulary size (None: unknown)."""
    if vocabulary is None:
        return 256, 1024
    return min(256, vocabulary // 2), vocabulary
