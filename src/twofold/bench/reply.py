"""A reply: what one streamed completion has said so far, and when its tokens came."""

from dataclasses import dataclass, field

from twofold.bench.sse import Choice, Usage
from twofold.request import FinishReason


@dataclass(slots=True)
class Reply:
    """Chunks of a stream with their times (seconds), and what the server says of the whole."""

    chunk_times_s: list[float] = field(default_factory=list)
    chunk_has_text: list[bool] = field(default_factory=list)
    ends_with_notice: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    done: bool = False

    def add(self, choice: Choice, now: float) -> None:
        """Take in a chunk; the role that opens a chat is no token, but an empty text may be one."""
        has_text = choice.has_text
        if not choice.opens_chat or choice.finish_reason is not None:
            self.chunk_times_s.append(now)
            self.chunk_has_text.append(has_text)
            self.ends_with_notice = not has_text and choice.finish_reason is not None
        self.finish_reason = choice.finish_reason or self.finish_reason

    @property
    def complete(self) -> bool:
        return self.done or self.finish_reason is not None

    @property
    def finish(self) -> FinishReason:
        """The server's finish reason in Twofold's words; whatever is not a length is a stop."""
        return FinishReason.LENGTH if self.finish_reason == "length" else FinishReason.STOP

    def token_times_s(self) -> list[float]:
        """When each output token came; there are as many as `usage` says, where the server sends it.

        A chunk counts as one token, except a last one that brings nothing but the finish reason. Where usage
        counts fewer tokens, chunks without text brought none. Where it counts more, chunks brought several:
        these have one time, so their gaps are zero, and the first and last time and every gap between chunks
        stay as they were seen. It does not matter for the gaps which chunk is taken to have brought more.
        """
        times = self.chunk_times_s
        without_notice = times[:-1] if self.ends_with_notice else times
        if self.usage is None:
            return list(without_notice)
        tokens = self.usage.completion_tokens
        if tokens < len(times):
            times = without_notice
        if tokens < len(times):
            times = [time for time, text in zip(self.chunk_times_s, self.chunk_has_text, strict=True) if text]
        if tokens <= len(times):
            return list(times)
        return [times[token * len(times) // tokens] for token in range(tokens)] if times else []
