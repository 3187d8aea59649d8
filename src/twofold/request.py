"""A request: what a user asks for, in the sizes that scheduling needs and the parameters that sampling needs."""

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """The two phases of a request (Splitwise section 2.2 calls them prompt and token)."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why a request ended. The first two are OpenAI's; the others never reach a well-behaved client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @property
    def complete(self) -> bool:
        """Whether the answer is whole."""
        return self is FinishReason.STOP or self is FinishReason.LENGTH


BlockKey = int | bytes  # the name of a block and all before it: a number in traces, a hash in a live service


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as schedulers and workloads see it: sizes and times, no text.

    `prompt_tokens` and `output_tokens` count tokens, `arrival_s` is in seconds on the clock of its world.
    `output_tokens` is the exact length in a trace and the upper bound (`max_tokens`) in a live service.
    `prefix_blocks` names the prompt's full blocks: equal names mean an equal block after an equal prefix. A trace has
    numbers for blocks of 512 tokens (Mooncake's `hash_ids`, which name a last block that is not full as well); a live
    service has hashes, salted by tenant, for blocks of its engine's size (`kvcache.prefix`). An instance that computes
    them keeps them for `retain_s` seconds, where it can, for requests that begin alike.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[BlockKey, ...] = ()
    retain_s: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Tokens whose KV this request may come to hold (the last output token never needs any)."""
        return self.prompt_tokens + self.output_tokens - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is picked; names and meanings are OpenAI's and vLLM's.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1.0 keep every token. `seed` keys the randomness
    together with the position of the token, so that the same request gives the same output wherever and
    however often it is run. `logprobs` asks for that many top alternatives besides the chosen token; None
    asks for none at all. `stop_token_ids` end the output as the model's own end-of-sequence ids do.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A live request whole: its sizes, its tokens, how to sample from it and on whose behalf.

    `key` is the name of the API key it came with (empty: none was asked for), never the key. Of two requests that
    wait, the one with the lower `priority` goes first (vLLM's meaning). After `deadline_s`, on the clock of
    `arrival_s`, nobody waits for the answer any more; None leaves that to the service. Only who has the same
    `cache_salt` finds its prompt (vLLM's meaning).
    """

    request: Request
    prompt_token_ids: list[int]
    sampling: SamplingParams
    key: str = ""
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One output token of a live request.

    `index` counts output tokens from 0. `top_logprobs` holds (token id, log probability) pairs, best first.
    `finish_reason` is set on the last token only.
    `reused_tokens`, on the first token only, are the prompt tokens whose KV was there and was not computed.
    """

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
