"""Between live requests and admission: a generation's ticket, and a refusal as the error that its client gets.

A request that is alive in the controller: where it runs and the tokens on their way to its client.

A request runs as one **attempt** after another: when the worker that holds it is lost, the next attempt starts from the
prompt and the tokens that are known, and goes on where the last one stopped. Workers know attempts, not requests, so
nothing that is said about an old attempt can touch a new one.
"""

import asyncio
from collections import deque
from enum import StrEnum

import msgspec

from twofold.errors import RequestError, TwofoldError
from twofold.request import Generation, TokenOutput
from twofold.scheduling.admission.limits import Refusal, RefusalReason
from twofold.scheduling.admission.queue import Ticket
from twofold.scheduling.cluster.router import Placement
from twofold.timeline import Timeline

_SENTENCES = {
    RefusalReason.QUEUE_FULL: "the service is full and so is the queue in front of it",
    RefusalReason.KEY_LIMIT: "this API key has as many requests as it may",
    RefusalReason.DEADLINE: "the request would not be answered within its timeout",
    RefusalReason.PREFILL_LOAD: "the first token would come too late, because of those that wait already",
    RefusalReason.DECODE_LOAD: "tokens would come too slowly, because of those that are being decoded already",
}


def ticket_of(generation: Generation) -> Ticket:
    return Ticket(generation.request, generation.key, generation.priority, generation.deadline_s)


def rejection_error(refusal: Refusal) -> RequestError:
    """A 429 that says when the request would be taken; `code` is the reason, with underscores.

    One that would be too slow even if nobody else were there is a 400, because to try again is of no use.
    """
    if refusal.reason is RefusalReason.BEYOND_SLO:
        return RequestError(
            "the request is too long for this service to answer it as fast as it promises; send a shorter prompt",
            code="beyond_slo",
        )
    seconds = refusal.retry_after_s
    return RequestError(
        f"{_SENTENCES[refusal.reason]}; try again in {seconds} s",
        status=429,
        code=refusal.reason.replace("-", "_"),
        retry_after_s=seconds,
    )


def deadline_error() -> RequestError:
    """The request's timeout is over, whether it waited or was being answered."""
    return RequestError(
        "the request was not answered within its timeout; send a longer timeout, or ask for less",
        status=504,
        code="deadline_exceeded",
    )


class AttemptStage(StrEnum):
    """Where an attempt was lost."""

    PROMPT = "prompt"  # queued, or in its prefill
    HANDOFF = "hand-off"
    DECODE = "decode"


class Attempt(msgspec.Struct, frozen=True):
    """One run of a request, from output token `first_index` on."""

    id: str
    generation: Generation
    placement: Placement
    first_index: int


class LiveRequest:
    """Puts the tokens of one request in order and hands them to the one task that waits for them.

    The first token of an attempt comes from the prefill instance and the others from the decode instance, so the
    second may overtake the first on its way here.
    """

    def __init__(self, generation: Generation) -> None:
        self.id = generation.request.id
        self.generation = generation
        self.ticket = ticket_of(generation)
        self.timeline = Timeline(generation.request)
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.handed_off = False  # the KV of this attempt is where it is decoded
        self.predicted_ttft_s: float | None = None  # what overload control said of the first attempt
        self.in_vain = 0  # attempts in a row that were lost before they made a token
        self._tokens: list[int] = []
        self._ordered: deque[TokenOutput] = deque()
        self._early: dict[int, TokenOutput] = {}
        self._failure: TwofoldError | None = None
        self._changed = asyncio.Event()

    @property
    def next_index(self) -> int:
        """The index of the output token that comes next."""
        return len(self._tokens)

    @property
    def stage(self) -> AttemptStage:
        """How far the attempt is, as far as is known here."""
        attempt = self.attempt
        if self._early:  # what overtakes the first token comes from the decode
            return AttemptStage.DECODE
        made = 0 if attempt is None else len(self._tokens) - attempt.first_index
        if attempt is None or not made:
            return AttemptStage.PROMPT
        waits = made == 1 and attempt.placement.route.splits and not self.handed_off
        return AttemptStage.HANDOFF if waits else AttemptStage.DECODE

    def what_is_left(self) -> Generation:
        """The generation of the next attempt: the tokens that are known are part of its prompt.

        Sampling is keyed by seed and position, so the tokens to come are those that would have come.
        """
        made = len(self._tokens)
        generation, request, sampling = self.generation, self.generation.request, self.generation.sampling
        attempt = msgspec.structs.replace(
            request,
            id=f"{request.id}~{self.attempts}",
            prompt_tokens=request.prompt_tokens + made,
            output_tokens=request.output_tokens - made,
        )
        if not made:
            return msgspec.structs.replace(generation, request=attempt)
        return msgspec.structs.replace(
            generation,
            request=attempt,
            prompt_token_ids=generation.prompt_token_ids + self._tokens,
            sampling=msgspec.structs.replace(
                sampling,
                max_tokens=sampling.max_tokens - made,
                min_tokens=max(0, sampling.min_tokens - made),
            ),
        )

    def begin(self, generation: Generation, placement: Placement) -> Attempt:
        """What is left of it was placed."""
        self.attempt = Attempt(generation.request.id, generation, placement, len(self._tokens))
        self.attempts += 1
        self.handed_off = False
        return self.attempt

    def lose(self) -> None:
        """The attempt is over, and tokens that it made out of order are forgotten."""
        if self.attempt is not None:
            self.in_vain = self.in_vain + 1 if self.attempt.first_index == len(self._tokens) else 0
        self.attempt = None
        self._early.clear()

    def push(self, output: TokenOutput) -> list[TokenOutput]:
        """A token of the attempt arrived; returns the tokens that are now in order, it and any that waited for it."""
        if self.attempt is not None and self.attempt.first_index:
            output = msgspec.structs.replace(output, index=output.index + self.attempt.first_index)
        self._early[output.index] = output
        ordered: list[TokenOutput] = []
        while (ready := self._early.pop(len(self._tokens), None)) is not None:
            ordered.append(ready)
            self._tokens.append(ready.token_id)
        self._ordered.extend(ordered)
        if ordered:
            self._changed.set()
        return ordered

    def fail(self, error: TwofoldError) -> None:
        """The request cannot go on; whoever waits is told after the tokens that are there."""
        self._failure = error
        self._changed.set()

    async def next(self) -> TokenOutput:
        """The next token in order; raises what the request failed with when there will be none."""
        while not self._ordered:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self._ordered.popleft()
