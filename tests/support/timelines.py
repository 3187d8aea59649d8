"""Construct request timelines (arrival, first token, end) for tests."""

from collections.abc import Sequence

from twofold.events import Recorder
from twofold.request import FinishReason, Request
from twofold.timeline import Moment, Timeline

SPLIT_MOMENTS = {
    "routed": 1.0,
    "prefill_started": 2.0,
    "handoff_started": 2.5,
    "handoff_ended": 4.5,
    "decode_started": 5.0,
}


def request_timeline(
    tokens: Sequence[float] = (),
    *,
    name: str = "r",
    arrived: float = 1.0,
    reason: FinishReason | None = FinishReason.LENGTH,
    prefill: str = "prefill-0",
    decode: str = "decode-0",
    **moments: float,
) -> Timeline:
    """Return the timeline of a request with the given token times."""
    recorder = Recorder()
    request = Request(id=name, arrival_s=arrived, prompt_tokens=10, output_tokens=max(1, len(tokens)))
    timeline = recorder.arrive(request, arrived)
    timeline.prefill_instance, timeline.decode_instance = prefill, decode
    for moment, at in moments.items():
        recorder.mark(name, Moment(moment), at)
    for at in tokens:
        recorder.token(name, at)
    if reason is not None:
        recorder.end(name, reason)
    return timeline
