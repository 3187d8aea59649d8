"""What admission says no to, as the error that the client gets."""

from twofold.errors import RequestError
from twofold.scheduling.admission_limits import Refusal, RefusalReason

_SENTENCES = {
    RefusalReason.QUEUE_FULL: "the service is full and so is the queue in front of it",
    RefusalReason.KEY_LIMIT: "this API key has as many requests as it may",
    RefusalReason.DEADLINE: "the request would not be answered within its timeout",
}


def refused(refusal: Refusal) -> RequestError:
    """A 429 that says when the request would be taken; `code` is the reason, with underscores."""
    seconds = refusal.retry_after_s
    return RequestError(
        f"{_SENTENCES[refusal.reason]}; try again in {seconds} s",
        status=429,
        code=refusal.reason.replace("-", "_"),
        retry_after_s=seconds,
    )
