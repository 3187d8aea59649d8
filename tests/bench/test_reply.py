"""Token counts come from the server's `usage`, and token times from the arrival of stream chunks."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.bench.client import Reply, StreamChoice, StreamDelta, StreamUsage


def reply_of(*choices: StreamChoice, tokens=None):
    reply = Reply(usage=None if tokens is None else StreamUsage(completion_tokens=tokens))
    for time_s, choice in enumerate(choices):
        reply.add(choice, float(time_s))
    return reply


def test_a_final_chunk_with_only_a_finish_reason_is_no_token():
    reply = reply_of(StreamChoice("a"), StreamChoice("b"), StreamChoice("", finish_reason="length"))
    assert reply.token_times_s() == [0.0, 1.0]


def test_a_final_token_without_text_counts_by_usage():
    """The end-of-sequence token is recorded, although it has no text."""
    reply = reply_of(StreamChoice("a"), StreamChoice("b"), StreamChoice("", finish_reason="stop"), tokens=3)
    assert reply.token_times_s() == [0.0, 1.0, 2.0]


def test_empty_chunks_are_dropped_when_usage_counts_fewer_tokens():
    reply = reply_of(StreamChoice(""), StreamChoice("a"), StreamChoice("b", finish_reason="length"), tokens=2)
    assert reply.token_times_s() == [1.0, 2.0]


def test_chat_role_chunks_are_no_tokens():
    reply = reply_of(
        StreamChoice(delta=StreamDelta(role="assistant")),
        StreamChoice(delta=StreamDelta(content="a")),
        StreamChoice(delta=StreamDelta(), finish_reason="stop"),
    )
    assert reply.token_times_s() == [1.0]


@given(chunks=st.integers(1, 30), extra=st.integers(0, 100))
def test_packed_chunks_keep_first_last_and_every_gap(chunks, extra):
    reply = reply_of(*[StreamChoice("a")] * chunks, tokens=chunks + extra)
    times = reply.token_times_s()
    assert len(times) == chunks + extra
    assert sorted(set(times)) == [float(number) for number in range(chunks)]
    assert times == sorted(times)


def test_maps_finish_reasons():
    assert reply_of(StreamChoice("a", finish_reason="length")).finish == "length"
    assert reply_of(StreamChoice("a", finish_reason="tool_calls")).finish == "stop"
    assert not reply_of(StreamChoice("a")).complete
