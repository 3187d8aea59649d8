"""Between live requests and admission: a generation's ticket, and a refusal as the error that its client gets."""

from twofold.errors import RequestError
from twofold.request import Generation
from twofold.scheduling.admission import Refusal, RefusalReason, Ticket

_SENTENCES = {
    RefusalReason.QUEUE_FULL: "the service is full and so is the queue in front of it",
    RefusalReason.KEY_LIMIT: "this API key has as many requests as it may",
    RefusalReason.DEADLINE: "the request would not be answered within its timeout",
    RefusalReason.PREFILL_LOAD: "the first token would come too late, because of those that wait already",
    RefusalReason.DECODE_LOAD: "tokens would come too slowly, because of those that are being decoded already",
}


def ticket_of(generation: Generation) -> Ticket:
    return Ticket(generation.request, generation.key, generation.priority, generation.deadline_s)


def refused(refusal: Refusal) -> RequestError:
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


def deadline_passed() -> RequestError:
    """The request's timeout is over, whether it waited or was being answered."""
    return RequestError(
        "the request was not answered within its timeout; send a longer timeout, or ask for less",
        status=504,
        code="deadline_exceeded",
    )
