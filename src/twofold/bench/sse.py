"""Server-sent events of a streamed completion: cut out of the bytes as they come, and decoded.

The client shares its cores with the server it measures, so only the fields named here are decoded.
"""

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct, frozen=True):
    """The new part of a chat message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content)


class Choice(msgspec.Struct, frozen=True):
    """The new part of a completion; `text` for /v1/completions, `delta` for /v1/chat/completions."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def opens_chat(self) -> bool:
        """Whether this says who speaks, and nothing else."""
        return self.delta is not None and self.delta.role is not None and not self.delta.has_text

    @property
    def has_text(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_text)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What became of the tokens of a prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed; 0 where the server does not say."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str | None = None


class Event(msgspec.Struct, frozen=True):
    """One event of a stream, or the whole body of an error."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: ErrorBody | str | None = None
    message: str | None = None  # where some servers put it in an error that has no `error` object

    @property
    def error_message(self) -> str | None:
        """What went wrong, if this event says that something did."""
        if self.error is None:
            return self.message
        return self.error if isinstance(self.error, str) else self.error.message or "no message"


decode_event = msgspec.json.Decoder(Event).decode


class EventSplitter:
    """Cuts a stream of bytes into the data of its events, however the network has cut the stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every line that is now complete. (A JSON event is always one `data:` line.)"""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def close(self) -> list[bytes]:
        """What is left when the stream ends without a newline."""
        return self.feed(b"\n")
