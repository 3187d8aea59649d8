"""Structured output: the tokens that a request's constraint allows next, by llguidance."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from twofold.errors import TwofoldError
from twofold.request import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED: Final = 64  # grammars kept for later requests
_FOLLOWED: Final = 4096  # requests with a kept state; the output of others is followed again from its first token
_REASON: Final = 300  # characters
# Without a limit, a model may write white space for ever.
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"


class GrammarError(TwofoldError):
    """A constraint cannot be compiled, or its grammar is too complex to follow."""


@dataclass(slots=True)
class _Followed:
    """A request's matcher, and the number of output tokens that it has consumed."""

    matcher: "LLMatcher"
    consumed: int = 0


class GrammarMatchers:
    """Compiles the constraints of requests in a thread, and follows the requests' output in the thread that samples.

    `tokenizer` returns the JSON of a tokenizer of the library `tokenizers`. It is called before the first constraint is
    compiled. Without `eos_token_ids`, those of the tokenizer end an output.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._read, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids) or None
        self._threads = ThreadPoolExecutor(1, "grammars")  # starts its thread with the first constraint
        self._submit = lru_cache(_COMPILED)(lambda constraint: self._threads.submit(self._compile, constraint))
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> "Future[LLMatcher]":
        """Return the future matcher of a constraint. It raises GrammarError if the constraint cannot be compiled."""
        with self._lock:
            return self._submit(constraint)

    def allowed(self, request_id: str, constraint: Constraint, output: Sequence[int]) -> bytes:
        """Return a bit for each token, from the lowest of a byte on: whether it may follow the output.

        An output that cannot be continued may only end. Raises GrammarError if the grammar is too complex.
        """
        followed = self._followed.get(request_id)
        if followed is None or followed.consumed > len(output):
            followed = self._followed[request_id] = _Followed(self.compile(constraint).result().deep_copy())
            if len(self._followed) > _FOLLOWED:
                self._followed.popitem(last=False)
        self._followed.move_to_end(request_id)
        matcher = followed.matcher
        for token_id in output[followed.consumed :]:
            if not matcher.is_stopped():
                matcher.consume_token(token_id)
        followed.consumed = len(output)
        mask: bytes = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_in_short(matcher.get_error()))
        return mask

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer  # noqa: PLC0415  (only for constrained requests)

        return LLTokenizer(self._read(), n_vocab=self._vocab_size, eos_token=self._eos)

    def _compile(self, constraint: Constraint) -> "LLMatcher":
        from llguidance import LLMatcher  # noqa: PLC0415  (only for constrained requests)

        try:
            vocabulary, grammar = self._vocabulary, _grammar(constraint)
        except Exception as error:  # the library raises bare Exceptions
            raise GrammarError(_in_short(str(error))) from error
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(_in_short(matcher.get_error()))
        return matcher


def allowed_tokens(mask: bytes, vocabulary: int) -> NDArray[np.bool_]:
    """Return whether each token of a vocabulary is allowed by a result of `GrammarMatchers.allowed`."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little").astype(np.bool_)


def is_allowed(mask: bytes, token_id: int) -> bool:
    """Return whether a token is allowed by a result of `GrammarMatchers.allowed`."""
    return token_id >= 0 and bool(mask[token_id // 8] >> token_id % 8 & 1)


def _grammar(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form."""
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415

    match constraint.kind:
        case ConstraintKind.JSON:
            return str(LLMatcher.grammar_from_json_schema(constraint.text, {"whitespace_pattern": WHITESPACE}))
        case ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(constraint.text))
        case ConstraintKind.CHOICE:
            choices = " | ".join(map(json.dumps, json.loads(constraint.text)))
            return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
        case ConstraintKind.GRAMMAR:
            return str(grammar_from("grammar", constraint.text))
        case ConstraintKind.LARK:
            return str(LLMatcher.grammar_from_lark(constraint.text))


def _in_short(reason: str) -> str:
    return " ".join(reason.split())[:_REASON] or "unknown error"
