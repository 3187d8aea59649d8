"""The stages of a request, from its timeline: what spans, logs and the dashboard show, cut in one place.

    queue ─ prefill ─ hand-off ─ decode queue ─ decode        (see the drawing in `twofold.timeline`)

A hand-off layer by layer begins while the prefill runs, so these two may overlap; one that has to wait for room
begins with the first token, when there is nothing else left to wait for.
"""

from enum import StrEnum

import msgspec

from twofold.timeline import Moment, Timeline


class StageName(StrEnum):
    """In the order in which a request goes through them."""

    QUEUE = "queue"
    PREFILL = "prefill"
    HANDOFF = "hand-off"
    DECODE_QUEUE = "decode queue"
    DECODE = "decode"


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of one request, in monotonic seconds; `end_s` None means that it goes on."""

    name: StageName
    start_s: float
    end_s: float | None


def stages_of(timeline: Timeline, ended_s: float | None = None) -> tuple[Stage, ...]:
    """The stages that have begun; those that go on are cut at `ended_s`, where the request ended then.

    What happens inside an iteration is known when it is over: until then a prompt that is being prefilled
    counts as queued, and KV that travels counts as travelling from the first token on.
    """
    at = timeline.moments.get
    first, landed, decoding = at(Moment.FIRST_TOKEN), at(Moment.HANDOFF_ENDED), at(Moment.DECODE_STARTED)
    prefilling = at(Moment.PREFILL_STARTED)
    complete = timeline.complete
    sending, split = at(Moment.HANDOFF_STARTED), splits(timeline)
    if first is not None and split and (decoding is not None or not complete):
        sending = first if sending is None else min(sending, first)
    ready = first
    if first is not None and split:
        ready = decoding if landed is None else max(first, landed)
    if complete and decoding is None:
        ready = None  # its first token was its last: nothing was to be decoded
    spans = (
        (StageName.QUEUE, timeline.moments[Moment.ARRIVED], first if prefilling is None else prefilling),
        (StageName.PREFILL, prefilling, first),
        (StageName.HANDOFF, sending, decoding if landed is None else landed),
        (StageName.DECODE_QUEUE, ready, decoding),
        (StageName.DECODE, decoding, at(Moment.LAST_TOKEN) if complete else None),
    )
    return tuple(
        Stage(name, start, _end(start, end, ended_s)) for name, start, end in spans if start is not None
    )


def stage_of(timeline: Timeline) -> StageName:
    """The stage that a request is in, as far as it is known (see `stages_of`)."""
    moments = timeline.moments
    if Moment.DECODE_STARTED in moments:
        return StageName.DECODE
    if Moment.FIRST_TOKEN in moments:
        waits = splits(timeline) and Moment.HANDOFF_ENDED not in moments
        return StageName.HANDOFF if waits else StageName.DECODE_QUEUE
    return StageName.PREFILL if Moment.PREFILL_STARTED in moments else StageName.QUEUE


def splits(timeline: Timeline) -> bool:
    """Whether the request is decoded elsewhere than it was prefilled."""
    return timeline.prefill_instance != timeline.decode_instance


def _end(start: float, end: float | None, ended_s: float | None) -> float | None:
    """Clocks of two processes may disagree by a little; a stage lasts no less than nothing."""
    end = ended_s if end is None else end
    return None if end is None else max(start, end)
