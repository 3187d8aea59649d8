"""A record: one request of a run as a line of the JSON report."""

import msgspec

from twofold.bench.load import LoadResult
from twofold.timeline import Moment


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds; `sent_s` counts from the start of the run, token times from `sent_s`."""

    id: str
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    token_times_s: list[float]
    chunks: int | None
    error: str | None
    detail: str | None


def records(result: LoadResult) -> list[RequestRecord]:
    """One record per request, in the order in which they were sent."""
    outcomes = {outcome.request_id: outcome for outcome in result.outcomes}
    made = []
    for timeline in result.timelines:
        sent_s = timeline.moments[Moment.ARRIVED]
        outcome = outcomes.get(timeline.request.id)
        made.append(
            RequestRecord(
                id=timeline.request.id,
                sent_s=sent_s - result.started_s,
                prompt_tokens=timeline.request.prompt_tokens,
                output_tokens=timeline.output_tokens,
                finish_reason=timeline.finish_reason,
                ttft_s=timeline.ttft_s,
                tpot_s=timeline.tpot_s,
                e2e_s=timeline.e2e_s,
                token_times_s=[time_s - sent_s for time_s in timeline.token_times_s],
                chunks=None if outcome is None else outcome.chunks,
                error=None if outcome is None else outcome.error,
                detail=None if outcome is None else outcome.detail,
            )
        )
    return sorted(made, key=lambda record: record.sent_s)
