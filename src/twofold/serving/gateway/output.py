"""Output processing: detokenization, stop strings, finish reasons and log probabilities."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from twofold.request import FinishReason, TokenOutput, TokenRun, TokenScore
from twofold.serving.gateway.responses import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs
from twofold.serving.gateway.schemas import GenerationFields
from twofold.serving.gateway.tokenizer import Detokenizer, TextTokenizer, id_name
from twofold.serving.gateway.tools.message_parser import CallDelta, MessageParser, together

# JSON has no infinity; OpenAI's API uses this value for probability zero.
LOWEST = -9999.0


class StopText(msgspec.Struct, frozen=True):
    """Text to emit, and the stop string that ended the output, if any."""

    text: str
    stop: str | None = None


class StopPattern:
    """A stop string, prepared once for all outputs of a request (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # _fallback[k]: the longest proper prefix of text that is also a suffix of its first k characters.
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for position in range(1, len(text)):
            while length and text[position] != text[length]:
                length = self._fallback[length]
            length += text[position] == text[length]
            self._fallback[position + 1] = length

    def advance(self, matched: int, char: str) -> int:
        """Return how many characters match after `char`, if `matched` of them matched before."""
        if matched == len(self.text):
            matched = self._fallback[matched]
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == char)

    def held(self, matched: int) -> int:
        """Return how many of the `matched` characters may begin another match."""
        return self._fallback[matched] if matched == len(self.text) else matched


def stop_patterns(stops: Iterable[str]) -> list[StopPattern]:
    """Return the patterns of stop strings, the longest first, so that it wins among simultaneous matches."""
    return [StopPattern(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]


class StopStrings:
    """Searches streamed text for stop strings. Text that may be the start of a stop string is held back."""

    def __init__(self, patterns: Sequence[StopPattern], *, include: bool = False) -> None:
        """Search for `patterns`. With `include`, the output contains the stop string."""
        self._patterns = patterns
        self._starts = {pattern.text[0] for pattern in patterns}
        self._matched = [0] * len(patterns)
        self._include = include
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> StopText:
        """Add `piece`, and return the text to emit. If `armed`, a stop string that it completes ends the output."""
        if self.skips((piece,)):
            return StopText(piece)
        text = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            self._matched = [
                pattern.advance(matched, char) for pattern, matched in zip(self._patterns, self._matched, strict=True)
            ]
            stop = self._complete() if armed else None
            if stop is not None:
                self._held = ""
                return StopText(text[: end if self._include else end - len(stop)], stop)
        keep = len(text) - max(map(StopPattern.held, self._patterns, self._matched))
        self._held = text[keep:]
        return StopText(text[:keep])

    def skips(self, texts: Iterable[str]) -> bool:
        """Return whether no match goes on, and none begins in these texts."""
        return not self._held and all(map(self._starts.isdisjoint, texts))

    def flush(self) -> str:
        """Return the text that is still held back when the output ends."""
        held, self._held = self._held, ""
        return held

    def _complete(self) -> str | None:
        for pattern, matched in zip(self._patterns, self._matched, strict=True):
            if matched == len(pattern.text):
                return pattern.text
        return None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Text and finish reason that one output token adds to a choice."""

    choice: int
    token: TokenOutput
    text: str  # empty while a character or a possible stop string is incomplete
    offset: int  # number of characters decoded before this token
    finish_reason: FinishReason | None
    stop: str | None = None  # the stop string that ended the output
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    called: bool = False  # whether the answer so far has tool calls
    of_prompt: bool = False  # the token belongs to the prompt, which the answer repeats


class OutputProcessor:
    """Detokenizes one output and searches its text for stop strings."""

    def __init__(
        self,
        index: int,
        tokenizer: TextTokenizer | None,
        fields: GenerationFields,
        stops: Sequence[StopPattern],
        parser: MessageParser | None = None,
    ) -> None:
        """Process the output of choice `index`. If `tokenizer` is None, the output text is empty.

        `parser` separates reasoning and tool calls from the text.
        """
        # Special tokens may delimit reasoning and tool calls.
        skip = fields.skip_special_tokens is not False and parser is None
        self._parser = parser
        self.index = index
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip) if tokenizer else None
        self._unread: list[int] = []  # tokens whose text came from a server
        self._silent = False  # whether the last token has no text
        self._include_stop = bool(fields.include_stop_str_in_output)
        self._stops = StopStrings(stops, include=self._include_stop) if stops else None
        self._min_tokens = fields.min_tokens or 0
        self._tokens = 0

    def echo(self, prompt: Sequence[int], scores: Sequence[TokenScore]) -> Iterator[Delta]:
        """Yield the tokens of the prompt; `scores` has the log probabilities of all but the first, or is empty."""
        for place, token_id in enumerate(prompt):
            offset = self._detokenizer.characters if self._detokenizer else 0
            text = self._detokenizer.push(token_id) if self._detokenizer else ""
            score = scores[place - 1] if scores and place else None
            token = TokenOutput(
                index=0,
                token_id=token_id,
                logprob=None if score is None else score.logprob,
                top_logprobs=() if score is None else score.top_logprobs,
            )
            yield Delta(choice=self.index, token=token, text=text, offset=offset, finish_reason=None, of_prompt=True)

    def push(self, token: TokenOutput) -> Delta:
        """Process an output token; return the text to emit and the finish reason (None before the end)."""
        self._tokens += 1
        offset = self._detokenizer.characters if self._detokenizer else 0
        text, reason, stop = self._text_of(token), token.finish_reason, None
        if self._stops is not None:
            found = self._stops.push(text, armed=self._tokens > self._min_tokens)
            text, stop = found.text, found.stop
            if stop is not None:
                reason = FinishReason.STOP
            elif reason is not None:
                text += self._stops.flush()
        delta = Delta(choice=self.index, token=token, text=text, offset=offset, finish_reason=reason, stop=stop)
        return delta if self._parser is None else self._parsed(delta, self._parser)

    def skip(self, run: TokenRun) -> bool:
        """Return whether the texts of these tokens are the texts to emit. Then, `push` must not process them."""
        if self._parser is not None or not (self._stops is None or self._stops.skips(run.texts)):
            return False
        self._tokens += len(run.token_ids)
        self._unread += run.token_ids
        self._silent = not run.texts[-1]
        return True

    def _parsed(self, delta: Delta, parser: MessageParser) -> Delta:
        part = parser.feed(delta.text)
        if delta.finish_reason is not None:
            part = together([part, parser.finish()])
        return msgspec.structs.replace(
            delta, text=part.content, reasoning=part.reasoning, calls=part.calls, called=parser.calls > 0
        )

    def _text_of(self, token: TokenOutput) -> str:
        if token.token_id < 0:  # of a server that returns text alone
            return token.text or ""
        if token.text is not None and (token.finish_reason is None or not self._ends_within_character(token)):
            self._unread.append(token.token_id)
            self._silent = not token.text
            return token.text
        if self._detokenizer is None:
            return ""
        self._catch_up(self._detokenizer)
        # The stop token is not part of the text.
        silent = token.finish_reason is FinishReason.STOP and not self._include_stop
        text = "" if silent else self._detokenizer.push(token.token_id)
        self._silent = not text
        return text if token.finish_reason is None else text + self._detokenizer.flush()

    def _ends_within_character(self, token: TokenOutput) -> bool:
        """Whether a server has detokenized all of an output but its last, incomplete character."""
        if token.text:
            return False
        return self._silent or token.finish_reason is not FinishReason.STOP

    def _catch_up(self, detokenizer: Detokenizer) -> None:
        """Read the tokens whose text the client has from a server, before the text of other tokens."""
        for token_id in self._unread:
            detokenizer.push(token_id)
        self._unread.clear()


class LogprobFormat:
    """Formats log probabilities for responses."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._names = None if tokenizer is None else tokenizer.bytes

    def completion(self, deltas: Sequence[Delta]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[delta.offset for delta in deltas],
            token_logprobs=[None if _unscored(delta) else _finite(delta.token.logprob) for delta in deltas],
            tokens=[self._name(delta.token.token_id) for delta in deltas],
            top_logprobs=[None if _unscored(delta) else self._top(delta) for delta in deltas],
        )

    def chat(self, deltas: Sequence[Delta], top: int) -> ChatLogprobs:
        return ChatLogprobs(content=[self._chat_token(delta, top) for delta in deltas])

    def _top(self, delta: Delta) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in (*delta.token.top_logprobs, (delta.token.token_id, delta.token.logprob)):
            top.setdefault(self._name(token_id), _finite(logprob))
        return top

    def _chat_token(self, delta: Delta, top: int) -> ChatTokenLogprob:
        token = delta.token
        return ChatTokenLogprob(
            token=self._name(token.token_id),
            logprob=_finite(token.logprob),
            bytes=self._bytes(token.token_id),
            top_logprobs=[
                ChatTopLogprob(token=self._name(token_id), logprob=_finite(logprob), bytes=self._bytes(token_id))
                for token_id, logprob in token.top_logprobs[:top]
            ],
        )

    def _name(self, token_id: int) -> str:
        return id_name(token_id) if self._names is None else self._names.name_of(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        raw = None if self._names is None else self._names.bytes_of(token_id)
        return None if raw is None else list(raw)


def _unscored(delta: Delta) -> bool:
    """Return whether the token is the first of a prompt, which has no probability."""
    return delta.of_prompt and delta.token.logprob is None


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > LOWEST else LOWEST
