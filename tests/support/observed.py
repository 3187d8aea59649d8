"""The events of a short simulation, for tests of observers."""

from twofold.instance import Role
from twofold.request import FinishReason, Request
from twofold.simulation.observers.base import IterationRun, KvTransfer
from twofold.timeline import Moment, Timeline

S = 10**12
MS = 10**9


def completed(request_id="chat-1", arrival_s=0.25):
    """Return the timeline of a completed request whose latencies are round numbers."""
    return Timeline(
        Request(id=request_id, arrival_s=arrival_s, prompt_tokens=1_204, output_tokens=5),
        moments={
            Moment.ARRIVED: arrival_s,
            Moment.ROUTED: arrival_s,
            Moment.PREFILL_STARTED: arrival_s + 0.125,
            Moment.HANDOFF_STARTED: arrival_s + 0.25,
            Moment.FIRST_TOKEN: arrival_s + 0.5,
            Moment.HANDOFF_ENDED: arrival_s + 0.5625,
            Moment.DECODE_STARTED: arrival_s + 0.625,
            Moment.LAST_TOKEN: arrival_s + 1,
        },
        output_tokens=5,
        finish_reason=FinishReason.LENGTH,
        prefill_instance="prefill-0",
        decode_instance="decode-0",
        preemptions=2,
    )


def refused(request_id="chat-2", arrival_s=0.5):
    """Return the timeline of a request that was rejected on arrival."""
    request = Request(id=request_id, arrival_s=arrival_s, prompt_tokens=9, output_tokens=1)
    return Timeline(request, moments={Moment.ARRIVED: arrival_s}, finish_reason=FinishReason.ERROR)


def report_run(observer):
    """Report the events of a short simulation to an observer."""
    observer.role("prefill-0", Role.PREFILL, 0)
    observer.role("decode-0", Role.DECODE, 0)
    observer.note(250 * MS, "placement", "chat-1", "prefill-0, decode-0")
    observer.run(IterationRun("prefill-0", 375 * MS, 750 * MS + 1, 1, 1_204, 1, 0, 0, 4_000.0))
    observer.transfer(KvTransfer("chat-1", "prefill-0", "decode-0", 500 * MS, 812_500_000_000, 987_654_321))
    observer.ended(refused(), 0.0)
    observer.run(IterationRun("decode-0", 875 * MS, 1_250 * MS, 32, 0, 0, 17, 20_468, 2_500.5))
    observer.ended(completed(), 0.0)
    observer.role("decode-0", Role.MIXED, 2 * S)
    observer.run(IterationRun("decode-0", 2 * S, 3 * S, 1, 2_048, 2, 3, 100, 3_000.0))
    observer.note(3 * S, "failure", "decode-0", "until the end")
    observer.close(12_345 * S + 1)
