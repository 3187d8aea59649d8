"""One choice of an answer: its tokens become text, end at a stop string and carry a finish reason."""

import msgspec

from twofold.request import FinishReason, TokenOutput
from twofold.serving.gateway.detokenizer import Detokenizer
from twofold.serving.gateway.schemas import GenerationFields
from twofold.serving.gateway.stops import StopStrings
from twofold.serving.gateway.tokenizer import TextTokenizer


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one token adds to choice `choice`.

    `text` may be empty (half a character, the beginning of a stop string) or more than the token's own.
    `offset` counts the characters that the tokens before this one decoded to.
    """

    choice: int
    token: TokenOutput
    text: str
    offset: int
    finish_reason: FinishReason | None


class Choice:
    """Turns the tokens of one generation into deltas."""

    def __init__(
        self, index: int, tokenizer: TextTokenizer | None, fields: GenerationFields, stops: tuple[str, ...]
    ) -> None:
        """Without a tokenizer the text stays empty and the tokens themselves are the answer."""
        skip = fields.skip_special_tokens is not False
        self._index = index
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip) if tokenizer else None
        self._include_stop = bool(fields.include_stop_str_in_output)
        self._stops = StopStrings(stops, include=self._include_stop)
        self._min_tokens = fields.min_tokens or 0
        self._tokens = 0

    def push(self, token: TokenOutput) -> Delta:
        """Add a token; the delta with a finish reason is the last, whether or not more tokens would come."""
        self._tokens += 1
        offset = self._detokenizer.characters if self._detokenizer else 0
        found = self._stops.push(self._text_of(token), armed=self._tokens > self._min_tokens)
        text, reason = found.text, token.finish_reason
        if found.stop is not None:
            reason = FinishReason.STOP
        elif reason is not None:
            text += self._stops.flush()
        return Delta(choice=self._index, token=token, text=text, offset=offset, finish_reason=reason)

    def _text_of(self, token: TokenOutput) -> str:
        if self._detokenizer is None:
            return ""
        # The token that ends the output is a sign to us and not a part of the text.
        silent = token.finish_reason is FinishReason.STOP and not self._include_stop
        text = "" if silent else self._detokenizer.push(token.token_id)
        return text if token.finish_reason is None else text + self._detokenizer.flush()
