"""Requests: sizes for scheduling and, in a live service, token ids and sampling parameters."""

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """The phases of a request; Splitwise section 2.2 calls them prompt and token."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Reason for the end of a request. `STOP` and `LENGTH` have the same meaning as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @property
    def complete(self) -> bool:
        """Whether the output is complete with this finish reason."""
        return self is FinishReason.STOP or self is FinishReason.LENGTH


BlockKey = int | bytes  # identifies a block and all blocks before it: a number in traces, a hash in a live service


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival time and sizes of a request, without its text.

    `arrival_s` is in seconds on the clock of the simulation or service. `output_tokens` is the exact length in a trace,
    but the limit (`max_tokens`) in a live service. `prefix_blocks` are the block keys of the prompt: equal keys mean
    equal blocks after equal prefixes. In traces they identify blocks of 512 tokens (Mooncake's `hash_ids`, including
    a partial last block). A live service hashes full blocks of its engine's block size with a salt per tenant
    (`kvcache.prefix`). Instances cache the computed blocks for at least `retain_s` seconds if memory allows.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[BlockKey, ...] = ()
    retain_s: float = 0.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters with the names and meanings of OpenAI and vLLM.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 keep every token. Sampling is keyed by `seed` and token
    position, so a request gives the same output on every worker and in every batch. `logprobs` is the number of top
    alternatives to return besides the sampled token; None returns no log probabilities. `stop_token_ids` end the
    output like the model's end-of-sequence tokens.
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
    """A live request: sizes, token ids, sampling parameters, and properties for admission and caching.

    `key` is the name of the API key, or empty. A lower `priority` is served first, as in vLLM. `deadline_s`
    is on the clock of `arrival_s`; None selects the default timeout. Prompts are cached separately per `cache_salt`,
    as in vLLM.
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

    `index` counts output tokens from 0. `top_logprobs` has pairs of token id and log probability, best first.
    `finish_reason` is set on the last token only. `reused_tokens`, set on the first token only, counts the prompt
    tokens found in the prefix cache.
    """

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
