"""Live requests, which continue on other workers if a worker is lost."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from twofold.errors import InstanceLostError, RequestError, TwofoldError
from twofold.events import PlacedRequest
from twofold.kvcache.prefix import later_keys
from twofold.request import Generation, TokenizerId, TokenOutput, TokenRun
from twofold.scheduling.admission.admission import QueuedRequest
from twofold.scheduling.admission.limits import Refusal, RefusalReason
from twofold.serving.telemetry.snapshot import AttemptStage

_REASONS = {
    RefusalReason.QUEUE_FULL: "the service and its queue are full",
    RefusalReason.KEY_LIMIT: "this API key has reached its limit",
    RefusalReason.DEADLINE: "the request would not be answered within its timeout",
    RefusalReason.PREFILL_LOAD: "the first token would miss the SLO behind the prompts that are waiting",
    RefusalReason.DECODE_LOAD: "token latency would miss the SLO beside the running decodes",
}


def rejection_error(refusal: Refusal) -> RequestError:
    """Return the HTTP error for a rejected request: 429 with a retry time, or 400 for a prompt too long for the SLO."""
    if refusal.reason is RefusalReason.BEYOND_SLO:
        return RequestError("the prompt is too long for this service's SLO: send a shorter one", code="beyond_slo")
    seconds = refusal.retry_after_s
    return RequestError(
        f"{_REASONS[refusal.reason]}; try again in {seconds} s",
        status=429,
        code=refusal.reason.replace("-", "_"),
        retry_after_s=seconds,
    )


def deadline_error() -> RequestError:
    """Return the HTTP error (status 504) for a request that exceeded its timeout."""
    return RequestError(
        "the request was not answered within its timeout: set a longer timeout, or request fewer tokens",
        status=504,
        code="deadline_exceeded",
    )


class OutputSink(Protocol):
    """Receiver of a request's output. Its methods raise nothing."""

    def output(self, output: TokenOutput) -> None:
        """Take the next token of the output; the last one has a finish reason."""
        ...

    def outputs(self, run: TokenRun) -> None:
        """Take the next tokens of the output, none of them the last."""
        for output in run.outputs():
            self.output(output)

    def failed(self, error: TwofoldError) -> None:
        """The request has failed, and gets no more tokens."""
        ...


class LiveRequest:
    """A live request, which puts its output tokens in order. Its `sink` gets them."""

    def __init__(self, generation: Generation, sink: OutputSink) -> None:
        self.id, self.sink = generation.request.id, sink
        self.generation = generation
        self.queued = QueuedRequest(generation.request, generation.key, generation.priority, generation.deadline_s)
        self.placed: PlacedRequest | None = None  # the current attempt
        self.current = generation  # generation of the current attempt
        self.first_index = 0  # index of the current attempt's first token
        self.attempts = 0
        self.handed_off = False  # the KV of this attempt is on its decode instance
        self.predicted_ttft_s: float | None = None  # overload control's prediction for the first attempt
        self.failed_in_a_row = 0  # consecutive attempts without a token
        self.refused_by = ""  # instance that refused the previous attempt
        self._prompt_ids: msgspec.Raw | None = None  # JSON list of a prompt that a server has tokenized
        self._tokens: list[int] = []
        self._early: dict[int, TokenOutput] = {}

    @property
    def next_index(self) -> int:
        return len(self._tokens)

    @property
    def stage(self) -> AttemptStage:
        """Current phase of the request: prefill, hand-off or decode."""
        if self._early:  # only decode tokens arrive early
            return AttemptStage.DECODE
        made = len(self._tokens) - self.first_index
        if self.placed is None or not made:
            return AttemptStage.PROMPT
        waits = made == 1 and self.placed.route.splits and not self.handed_off
        return AttemptStage.HANDOFF if waits else AttemptStage.DECODE

    def tokenized(self, prompt_ids: msgspec.Raw) -> None:
        """Record the token ids of a prompt (a JSON list), which a server has tokenized."""
        self._prompt_ids = prompt_ids

    def remaining(self) -> Generation:
        """Return a retry's input: prompt and output so far. Raises InstanceLostError for invalid ids of the prompt."""
        made = len(self._tokens)
        if made and self._prompt_ids is not None:
            try:
                self._name_prompt(msgspec.json.decode(self._prompt_ids, type=list[TokenizerId]))
            except msgspec.DecodeError as error:
                raise InstanceLostError("a server returned invalid token ids of the prompt, and was lost") from error
            self._prompt_ids = None
        generation, request, sampling = self.generation, self.generation.request, self.generation.sampling
        attempt = msgspec.structs.replace(
            request,
            id=f"{request.id}~{self.attempts}",
            prompt_tokens=request.prompt_tokens + made,
            output_tokens=request.output_tokens - made,
        )
        if not made:
            return msgspec.structs.replace(generation, request=attempt)
        token_ids, chain = generation.prompt_token_ids + self._tokens, generation.chain
        if chain is not None:  # the KV of the output may be cached
            keys = request.prefix_blocks
            more = later_keys(chain, keys, token_ids[len(keys) * chain.block_size :])
            attempt = msgspec.structs.replace(attempt, prefix_blocks=(*keys, *more))
        return msgspec.structs.replace(
            generation,
            request=attempt,
            prompt_token_ids=token_ids,
            sampling=msgspec.structs.replace(
                sampling,
                max_tokens=sampling.max_tokens - made,
                min_tokens=max(0, sampling.min_tokens - made),
                resumed_tokens=made,
                prompt_logprobs=None,  # they came with the first token
            ),
        )

    def _name_prompt(self, token_ids: list[int]) -> None:
        # The output continues exactly after the tokens of the server that began it.
        request = msgspec.structs.replace(self.generation.request, prompt_tokens=len(token_ids))
        self.generation = msgspec.structs.replace(
            self.generation, request=request, prompt_token_ids=token_ids, prompt_text=None
        )

    def begin(self, generation: Generation, placed: PlacedRequest) -> None:
        """Record that the request now runs on the instances in `placed`."""
        self.placed, self.current, self.first_index = placed, generation, len(self._tokens)
        self.attempts += 1
        self.handed_off = False
        self.refused_by = ""

    def end_attempt(self) -> None:
        """Record that the request no longer runs on any instance."""
        if self.placed is not None:
            self.failed_in_a_row = self.failed_in_a_row + 1 if self.first_index == len(self._tokens) else 0
        self.placed = None
        self._early.clear()

    def push(self, output: TokenOutput) -> Sequence[TokenOutput]:
        """Add an output token; return all tokens that can now be delivered in order."""
        if self.first_index:
            output = msgspec.structs.replace(output, index=output.index + self.first_index)
        if output.index == len(self._tokens) and not self._early:
            self._tokens.append(output.token_id)
            return (output,)
        self._early[output.index] = output
        ordered: list[TokenOutput] = []
        while (ready := self._early.pop(len(self._tokens), None)) is not None:
            ordered.append(ready)
            self._tokens.append(ready.token_id)
        return ordered

    def push_run(self, run: TokenRun) -> TokenRun | None:
        """Add output tokens and return them in the order of the output; None unless they are its next tokens."""
        index = run.index + self.first_index
        if index != len(self._tokens) or self._early:
            return None
        self._tokens += run.token_ids
        return run if index == run.index else TokenRun(index, run.token_ids, run.texts)
