"""Requests: their sizes, for scheduling; for a live service, also token ids and sampling parameters."""

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """Phases of a request. Splitwise (section 2.2) calls them prompt phase and token phase."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Reason for the end of a request. `STOP` and `LENGTH` are as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @property
    def complete(self) -> bool:
        """Whether the output of a request with this finish reason is complete."""
        return self is FinishReason.STOP or self is FinishReason.LENGTH


BlockKey = int | bytes  # identifies a block and all blocks before it: a number in traces, a hash in a live service


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival time and sizes of a request, without its text.

    `arrival_s` is in seconds on the clock of the simulation or service. `output_tokens` is the exact output length in a
    trace, the limit (`max_tokens`) in a live service. `prefix_blocks` are the block keys of the prompt; equal keys mean
    equal tokens up to the end of the block. Keys in traces are Mooncake's `hash_ids` of 512-token blocks, with a
    partial last block. Keys in a live service are hashes of full engine blocks, salted per tenant. Instances cache the
    computed blocks for at least `retain_s` seconds if memory allows.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[BlockKey, ...] = ()
    retain_s: float = 0.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters, named as in OpenAI and vLLM.

    A `temperature` of 0 means greedy sampling. `top_k` 0 and `top_p` 1.0 do not restrict the tokens. Equal seeds give
    equal outputs on every worker and in every batch. `logprobs` is the number of most likely tokens returned with log
    probabilities, in addition to the sampled token; None means no log probabilities. `stop_token_ids` end the output.
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
    """A live request: sizes, token ids, sampling parameters, and settings for admission and caching. `key` is the name
    of the API key, or empty. Lower `priority` values are served first, as in vLLM. `deadline_s` is on the clock of
    `arrival_s`; None selects the default timeout. Requests with different `cache_salt` share no cached prompts.
    """

    request: Request
    prompt_token_ids: list[int]
    sampling: SamplingParams
    key: str = ""
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One output token of a live request. `index` counts from 0. `top_logprobs` has (token id, log probability) pairs,
    most likely first. Only the last token has a `finish_reason`. Only the first token has `reused_tokens`, the number
    of prompt tokens found in the prefix cache.
    """

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
