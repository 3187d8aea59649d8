"""Tests of the benchmark client."""

import asyncio

import pytest

from support.scripted_endpoint import DONE, Drop, Hang, Refuse, Send, chunk, endpoint, event, usage
from twofold.bench.client import Client, ClientConfig
from twofold.bench.endpoint import Endpoint
from twofold.events import Recorder
from twofold.request import FinishReason, Request

REQUEST = Request(id="r", arrival_s=0.0, prompt_tokens=3, output_tokens=4)


def send(scripted, config=None, prompt="hello", api_key=None):
    """Send one request to a fake server; return its timeline and outcome."""
    timelines = []

    async def run():
        target = Endpoint(base_url=scripted.url, model="scripted")
        async with Client(target, Recorder([timelines.append]), config or ClientConfig(), api_key) as client:
            return await client.send(REQUEST, client.body(REQUEST, prompt))

    outcome = asyncio.run(run())
    assert len(timelines) == 1
    return timelines[0], outcome


def test_records_each_token_of_a_successful_reply():
    """Every output token has a timestamp, timestamps never decrease, and TTFT ≤ E2E."""
    with endpoint() as scripted:
        timeline, outcome = send(scripted)
    assert outcome.error is None
    assert outcome.chunks == timeline.output_tokens == 4
    assert timeline.finish_reason is FinishReason.LENGTH
    assert timeline.token_times_s == sorted(timeline.token_times_s)
    assert 0 < timeline.ttft_s <= timeline.e2e_s


def test_request_body_matches_the_workload():
    with endpoint() as scripted:
        send(scripted, ClientConfig(temperature=0.5), prompt=[5, 6, 7], api_key="secret")
    body = scripted.bodies[0]
    assert body["prompt"] == [5, 6, 7]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("scripted", 4, 0.5)
    assert (body["stream"], body["ignore_eos"]) == (True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert scripted.headers[0]["Authorization"] == "Bearer secret"


def test_prompt_length_is_taken_from_usage():
    with endpoint(lambda _: [Send(chunk() + chunk("", "stop") + usage(9, 1) + DONE)]) as scripted:
        timeline, _ = send(scripted)
    assert timeline.request.prompt_tokens == 9
    assert timeline.output_tokens == 1


def test_several_tokens_in_a_chunk_are_counted_from_usage():
    """If a stream of two chunks reports a usage of six tokens, six output tokens are recorded."""
    with endpoint(lambda _: [Send(chunk("abc")), Send(chunk("def", "length") + usage(3, 6) + DONE)]) as scripted:
        timeline, outcome = send(scripted)
    assert outcome.chunks == 2
    assert timeline.output_tokens == 6
    assert len(set(timeline.token_times_s)) <= 2


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([Refuse(429)], "HTTP 429"),
        ([Refuse(500, b"<html>")], "HTTP 500"),
        ([Send(chunk()), Send(event(error={"message": "out of memory"}))], "error event"),
        ([Send(chunk()), Drop()], "disconnected"),
        ([Send(chunk())], "incomplete stream"),
        ([Send(b"data: {nonsense\n\n")], "malformed event"),
        ([Send(chunk("", "stop") + usage(3, 0) + DONE)], "no tokens"),
        ([Send(chunk()), Hang()], "timeout"),
    ],
)
def test_failures_have_a_reason(steps, reason):
    with endpoint(lambda _: steps) as scripted:
        timeline, outcome = send(scripted, ClientConfig(timeout_s=1.0) if reason == "timeout" else None)
    assert outcome.error == reason
    assert outcome.detail
    assert timeline.finish_reason is FinishReason.ERROR


def test_server_error_messages_reach_the_outcome():
    """The recorded outcome of a failed request contains the server's error message."""
    with endpoint(lambda _: [Refuse(400, b'{"error": {"message": "prompt too long"}}')]) as scripted:
        assert send(scripted)[1].detail == "prompt too long"
    with endpoint(lambda _: [Send(event(error={"message": "worker lost"}))]) as scripted:
        assert send(scripted)[1].detail == "worker lost"


def test_a_disconnect_after_done_is_not_an_error():
    with endpoint(lambda _: [Send(chunk("x", "length")), Send(DONE), Drop()]) as scripted:
        timeline, outcome = send(scripted)
    assert outcome.error is None
    assert timeline.output_tokens == 1


def test_a_refused_connection_fails_the_request():
    with endpoint() as scripted:
        pass
    assert send(scripted)[1].error == "cannot connect"


def test_chat_sends_the_prompt_as_a_user_message():
    deltas = [
        event(choices=[{"delta": delta}]) for delta in ({"role": "assistant"}, {"content": "a"}, {"content": "b"})
    ]
    closing = event(choices=[{"delta": {}, "finish_reason": "length"}])
    with endpoint(lambda _: [Send(b"".join(deltas) + closing + usage(3, 2) + DONE)]) as scripted:
        timeline, outcome = send(scripted, ClientConfig(chat=True), prompt="hello")
    assert outcome.error is None
    assert timeline.output_tokens == 2
    assert scripted.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
