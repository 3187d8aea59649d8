"""Log probabilities in the two formats of the API."""

from collections.abc import Sequence

from twofold.serving.gateway.choice import Delta
from twofold.serving.gateway.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
)
from twofold.serving.gateway.token_bytes import TokenBytes, id_name

# JSON has no infinity; the API writes this for a token of probability zero.
LOWEST = -9999.0


class LogprobFormat:
    """Writes the log probabilities of deltas; one entry per token, the one that ends the output included."""

    def __init__(self, names: TokenBytes | None) -> None:
        """Without a tokenizer there are no `names`, and tokens are called by their ids."""
        self._names = names

    def completion(self, deltas: Sequence[Delta]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[delta.offset for delta in deltas],
            token_logprobs=[_finite(delta.token.logprob) for delta in deltas],
            tokens=[self._name(delta.token.token_id) for delta in deltas],
            top_logprobs=[self._top(delta) for delta in deltas],
        )

    def chat(self, deltas: Sequence[Delta], top: int) -> ChatLogprobs:
        return ChatLogprobs(content=[self._chat_token(delta, top) for delta in deltas])

    def _top(self, delta: Delta) -> dict[str, float]:
        """The alternatives, best first, and the chosen token; of two that share a name the better one."""
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
                ChatTopLogprob(
                    token=self._name(token_id), logprob=_finite(logprob), bytes=self._bytes(token_id)
                )
                for token_id, logprob in token.top_logprobs[:top]
            ],
        )

    def _name(self, token_id: int) -> str:
        return id_name(token_id) if self._names is None else self._names.name_of(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        raw = None if self._names is None else self._names.bytes_of(token_id)
        return None if raw is None else list(raw)


def _finite(logprob: float | None) -> float:
    """Written so that NaN comes out as LOWEST as well."""
    return logprob if logprob is not None and logprob > LOWEST else LOWEST
