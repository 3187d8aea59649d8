"""Data types of requests: lengths for scheduling, token ids and sampling parameters for live generation."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import msgspec

TokenizerId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # a token id, as tokenizers take it


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
    """Arrival time, prompt length and output length of a request, without its text.

    `prefix_blocks` are the block keys of the prompt. In a trace, they are Mooncake's `hash_ids` of 512-token blocks. In
    a live service, they are hashes of full engine blocks, salted per tenant.
    """

    id: str
    arrival_s: float  # on the clock of the simulation or service
    prompt_tokens: int
    output_tokens: int  # exact length in a trace, limit (`max_tokens`) in a live service
    prefix_blocks: tuple[BlockKey, ...] = ()  # in traces, the last block may be partial
    retain_s: float = 0.0  # instances cache the computed blocks for at least this time if memory allows
    # A turn arrives `think_s` after the end of its session's previous turn, but not before `arrival_s`. Its prompt is
    # the previous turn's prompt and output, and new tokens.
    session: str = ""
    think_s: float = 0.0
    shared_tokens: int = 0  # leading prompt tokens that all sessions have in common
    adapter: str = ""  # name of a LoRA adapter


class ConstraintKind(StrEnum):
    """Languages of constraints on an output, named as vLLM's `structured_outputs`."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    GRAMMAR = "grammar"  # Lark or GBNF
    LARK = "lark"


class Constraint(msgspec.Struct, frozen=True):
    """Constraint on an output: the whole text must match it."""

    kind: ConstraintKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters, named as in OpenAI and vLLM. Equal seeds give equal outputs on all workers, in any batch."""

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0  # 0 means greedy sampling
    top_p: float = 1.0
    top_k: int = 0  # 0 means all tokens
    min_p: float = 0.0  # least probability of a token, as a share of the highest probability
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    bad_words: tuple[str, ...] = ()  # strings that the output must not contain
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # their token ids
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # number of most likely tokens to return, besides the sampled token
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    constraint: Constraint | None = None
    resumed_tokens: int = 0  # output tokens that earlier attempts generated: they are the end of the prompt

    @property
    def needs_history(self) -> bool:
        """Whether the sampled token depends on the tokens before it, besides the logits."""
        penalizes = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalizes or self.bad_word_ids or self.constraint is not None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class BlockChain(msgspec.Struct, frozen=True):
    """Beginning of the hash chain of a request's block keys, which its output continues (`kvcache.prefix`)."""

    root: bytes
    block_size: int


class PromptText(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as text, for servers that tokenize it themselves and return text beside the tokens."""

    json: bytes  # a JSON string: that of the client if it sent one text
    add_special_tokens: bool
    skip_special_tokens: bool  # in the output


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A live request: lengths, token ids, sampling parameters, and settings for admission and caching."""

    request: Request
    prompt_token_ids: list[int]
    prompt_text: PromptText | None = None  # then, `prompt_token_ids` is empty, and the request's length a guess
    sampling: SamplingParams
    chain: BlockChain | None = None  # of `Request.prefix_blocks`; None if the KV of its output is not cached
    key: str = ""  # name of the API key
    priority: int = 0  # lower values are served first, as in vLLM
    deadline_s: float | None = None  # on the clock of `arrival_s`; None selects the default timeout
    cache_salt: str = ""  # requests with different salts share no cached prompts
    returns_timings: bool = False  # with each output token
    server_fields: dict[str, msgspec.Raw] = {}  # JSON fields of the request that only servers behind the gateway know


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of a given token, and the tokens with the highest ones."""

    logprob: float  # natural logarithm, without temperature
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, log probability), most likely first


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a request by phase, up to its second token; None for a phase that it has not completed or not had."""

    gateway_queue_s: float | None = None  # tokenizing, admission, and the wait for an instance
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None  # sum of the three
    kv_transfer_visible_s: float | None = None
    decode_queue_s: float | None = None
    first_decode_s: float | None = None  # first decode iteration
    first_gap_s: float | None = None  # sum of the three: gap between the first and the second token
    kv_transfer_hidden_s: float | None = None  # part of the transfer that overlaps the prefill


class TokenRun(msgspec.Struct, frozen=True):
    """Consecutive tokens with an id and a text alone, neither first nor last, that a server has sent together."""

    index: int  # of the first of them
    token_ids: list[int]
    texts: list[str]

    def outputs(self) -> Iterator["TokenOutput"]:
        """Yield the tokens one by one."""
        for index, (token_id, text) in enumerate(zip(self.token_ids, self.texts, strict=True), self.index):
            yield TokenOutput(index=index, token_id=token_id, text=text)


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One output token of a live request."""

    index: int  # from 0
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, log probability), most likely first
    finish_reason: FinishReason | None = None  # of the last token
    reused_tokens: int = 0  # prompt tokens found in the prefix cache, with the first token
    prompt_scores: tuple[TokenScore, ...] = ()  # of the second prompt token and all after it, with the first token
    text: str | None = None  # that the token adds to the output, from a server that detokenizes
    prompt_tokens: int = 0  # length of a prompt that a server has tokenized, with the first token
    timings: RequestTimings | None = None  # of the request up to this token, if it returns them
