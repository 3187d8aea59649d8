"""The load generator is open-loop: it sends each request when it is due, and records every request."""

import asyncio

import pytest

from support.scripted_endpoint import Drop, Hang, Pause, Refuse, Send, UntilAsked, chunk, endpoint, well_behaved
from twofold.bench.endpoint import Endpoint
from twofold.bench.load import LoadConfig, records, run_load
from twofold.errors import ConfigurationError
from twofold.request import FinishReason, Request
from twofold.timeline import Moment


def trace(count, gap_s=0.0, output_tokens=3):
    """Return requests that arrive `gap_s` apart, with increasing prompt lengths."""
    return [
        Request(id=str(n), arrival_s=3600 + n * gap_s, prompt_tokens=10 + n, output_tokens=output_tokens)
        for n in range(count)
    ]


def load(scripted, requests, stop_after=None, on_change=None, **settings):
    config = LoadConfig(endpoint=Endpoint(base_url=scripted.url, model="scripted"), **settings)

    async def run():
        stop = asyncio.Event()

        def watch(counts):
            if on_change:
                on_change(counts)
            if stop_after is not None and counts.done >= stop_after:
                stop.set()

        return await run_load(config, requests, stop=stop, on_change=watch)

    return asyncio.run(run())


def in_order_of_sending(result):
    return sorted(result.timelines, key=lambda timeline: timeline.moments[Moment.ARRIVED])


def test_every_request_is_sent_in_order_and_answered():
    with endpoint() as scripted:
        result = load(scripted, trace(20, gap_s=0.005))
    assert [timeline.request.id for timeline in in_order_of_sending(result)] == [str(n) for n in range(20)]
    # Separate connections, so the server may read them in any order.
    assert sorted(len(body["prompt"]) for body in scripted.bodies) == [10 + n for n in range(20)]
    assert len(result.timelines) == len(result.outcomes) == len(result.send_lags_s) == 20
    assert all(timeline.output_tokens == 3 for timeline in result.timelines)
    assert result.errors == {}
    assert not result.interrupted
    assert result.packed_tokens == 0


def test_requests_do_not_leave_before_they_are_due():
    with endpoint() as scripted:
        result = load(scripted, trace(8, gap_s=0.02))
    sent_s = [timeline.moments[Moment.ARRIVED] - result.started_s for timeline in in_order_of_sending(result)]
    assert all(moment_s >= n * 0.02 - 1e-4 for n, moment_s in enumerate(sent_s))
    assert all(lag >= 0 for lag in result.send_lags_s)


def test_requests_do_not_wait_for_earlier_replies():
    """The client sends ten requests before the server replies to any of them."""
    in_flight = []

    def script(body):
        return [UntilAsked(10), *well_behaved(body)]

    with endpoint(script) as scripted:
        result = load(scripted, trace(10), on_change=lambda counts: in_flight.append(counts.sent - counts.done))
    assert result.errors == {}
    assert max(in_flight) == 10


def test_max_concurrency_caps_requests_in_flight():
    in_flight = []
    with endpoint(lambda body: [UntilAsked(2), Pause(0.01), *well_behaved(body)]) as scripted:
        result = load(
            scripted, trace(10), max_concurrency=2, on_change=lambda counts: in_flight.append(counts.sent - counts.done)
        )
    assert max(in_flight) == 2
    assert len(result.outcomes) == 10


def test_failures_are_counted_and_do_not_stop_the_rest():
    """The server rejects every third request with 429, and the other requests complete."""

    def script(body):
        return [Refuse(429)] if len(body["prompt"]) % 3 == 0 else well_behaved(body)

    with endpoint(script) as scripted:
        result = load(scripted, trace(9))
    assert sorted(result.errors.values()) == ["HTTP 429"] * 3
    finished = [timeline.finish_reason for timeline in result.timelines]
    assert finished.count(FinishReason.LENGTH) == 6
    assert finished.count(FinishReason.ERROR) == 3


def test_stopping_keeps_the_completed_requests():
    """If a run is stopped, the completed requests are kept."""

    def script(body):
        return well_behaved(body) if len(body["prompt"]) < 12 else [Send(chunk()), Hang()]

    with endpoint(script) as scripted:
        result = load(scripted, [*trace(5), *trace(6, gap_s=3600)[5:]], stop_after=2)
    assert result.interrupted
    reasons = [timeline.finish_reason for timeline in result.timelines]
    assert reasons.count(FinishReason.LENGTH) == 2
    assert set(reasons) <= {FinishReason.LENGTH, FinishReason.ABORT}
    assert len(result.outcomes) == 2
    assert len(records(result)) == len(result.timelines)


def test_warmup_is_sent_first_and_not_measured():
    with endpoint() as scripted:
        result = load(scripted, trace(4), warmup=3)
    assert len(scripted.bodies) == 7
    assert sorted(timeline.request.id for timeline in result.timelines) == ["0", "1", "2", "3"]


def test_a_failed_warmup_ends_the_run():
    """A failed warm-up request raises an error before the load starts."""
    with endpoint(lambda _: [Refuse(400)]) as scripted, pytest.raises(ConfigurationError, match="HTTP 400"):
        load(scripted, trace(4), warmup=2)


def test_an_empty_workload_gives_an_empty_result():
    with endpoint() as scripted:
        result = load(scripted, [])
    assert result.timelines == []
    assert result.duration_s == 0.0


def test_records_are_in_sending_order():

    def script(body):
        # The first request ends last.
        kinds = {10: [UntilAsked(3), *well_behaved(body)], 11: [Send(chunk()), Drop()]}
        return kinds.get(len(body["prompt"]), well_behaved(body))

    with endpoint(script) as scripted:
        lines = records(load(scripted, trace(3, gap_s=0.02)))
    assert [line.id for line in lines] == ["0", "1", "2"]
    assert [line.error for line in lines] == [None, "disconnected", None]
    assert lines[0].sent_s >= 0
    for line in lines:
        assert line.token_times_s == sorted(line.token_times_s)
        assert len(line.token_times_s) == line.output_tokens
    assert lines[0].ttft_s == pytest.approx(lines[0].token_times_s[0])


def test_a_closed_loop_sends_a_request_when_one_has_ended():
    """The number of requests in flight is the number of clients. Arrival times have no effect."""
    running = most = 0

    def script(body):
        return [Pause(0.02), *well_behaved(body)]

    def watch(counts):
        nonlocal running, most
        running = counts.sent - counts.done
        most = max(most, running)

    with endpoint(script) as scripted:
        result = load(scripted, trace(12, gap_s=3600.0), on_change=watch, concurrency=3, think_s=0.01)
    assert len(result.timelines) == 12
    assert most == 3
    ends = sorted(timeline.moments[Moment.LAST_TOKEN] for timeline in result.timelines)
    starts = sorted(timeline.moments[Moment.ARRIVED] for timeline in result.timelines)
    assert all(later >= end + 0.01 for end, later in zip(ends, starts[3:], strict=False))
