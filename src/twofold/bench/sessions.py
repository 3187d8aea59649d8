"""Prompts of the turns of a session, which contain the answers to earlier turns."""

from dataclasses import dataclass
from typing import Self

from twofold.bench.client import Reply
from twofold.bench.prompts import Prompt, PromptForm, PromptMaker
from twofold.errors import ConfigurationError
from twofold.request import Request


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A session so far: its turns' tokens or text, or the messages of a chat, and their length as planned."""

    maker: PromptMaker
    chat: bool
    so_far: Prompt | None = None
    tokens: int = 0

    def prompt(self, request: Request) -> Prompt:
        """Return the prompt of the next turn: the session so far and new tokens."""
        if self.so_far is None:
            first = self.maker.prompt(request)
            return [{"role": "user", "content": str(first)}] if self.chat else first
        new = self.maker.continuation(request, max(1, request.prompt_tokens - self.tokens))
        return _joined(self.so_far, {"role": "user", "content": new} if self.chat else new)

    def answered(self, request: Request, prompt: Prompt, reply: Reply) -> Self:
        """Return the session with the answer to a turn; made-up tokens stand for the answer of a failed turn.

        Raises ConfigurationError if prompts are token ids, and the server returns none.
        """
        answer: list[int] | str = reply.text
        if self.maker.form is PromptForm.TOKENS:
            if reply.complete and not reply.token_ids:
                raise ConfigurationError(
                    "the endpoint returns no token ids, which the next turn of a session needs: use --prompt-form text"
                )
            answer = reply.token_ids or self.maker.token_ids(request)[: request.output_tokens]
        after = _joined(prompt, {"role": "assistant", "content": answer} if self.chat else answer)
        return type(self)(self.maker, self.chat, after, request.prompt_tokens + request.output_tokens)


def _joined(before: Prompt, more: list[int] | str | dict[str, object]) -> Prompt:
    if isinstance(before, str):
        return f"{before} {more}"
    return [*before, *more] if isinstance(more, list) else [*before, more]
