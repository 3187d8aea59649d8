"""Helpers to test admission queues without instances."""

from twofold.request import Request
from twofold.scheduling.admission.admission import Admission, QueuedRequest
from twofold.scheduling.admission.limits import AdmissionLimits, Refusal


def admission(**limits) -> Admission:
    return Admission(AdmissionLimits(**limits))


def ticket(name: str, *, now: float = 0.0, prompt_tokens: int = 1, **fields) -> QueuedRequest:
    request = Request(id=name, arrival_s=now, prompt_tokens=prompt_tokens, output_tokens=1)
    return QueuedRequest(request, **fields)


def offer(door: Admission, name: str, *, now: float = 0.0, **fields) -> Refusal | None:
    return door.offer(ticket(name, now=now, **fields), now)


def drain(door: Admission, now: float) -> list[QueuedRequest]:
    """Start all requests that the admission queue may start now, and return them."""
    started = []
    while (each := door.next(now)) is not None:
        started.append(each)
    return started
