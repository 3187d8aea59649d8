"""Tokens are counted as the server counts them, and each has a time that was seen."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.bench.client import Reply, StreamChoice, StreamDelta, StreamUsage


def reply_of(*choices: StreamChoice, tokens=None):
    reply = Reply(usage=None if tokens is None else StreamUsage(completion_tokens=tokens))
    for time_s, choice in enumerate(choices):
        reply.add(choice, float(time_s))
    return reply


def test_a_closing_notice_is_no_token_without_usage():
    """A last chunk that brings only the finish reason is not counted."""
    reply = reply_of(StreamChoice("a"), StreamChoice("b"), StreamChoice("", finish_reason="length"))
    assert reply.token_times_s() == [0.0, 1.0]


def test_a_last_token_without_text_counts_when_usage_says_so():
    """The end-of-sequence token has no text, and usage knows that it was a token."""
    reply = reply_of(StreamChoice("a"), StreamChoice("b"), StreamChoice("", finish_reason="stop"), tokens=3)
    assert reply.token_times_s() == [0.0, 1.0, 2.0]


def test_chunks_without_text_give_way_when_usage_counts_fewer():
    """An empty opening chunk must not pass for the first token."""
    reply = reply_of(StreamChoice(""), StreamChoice("a"), StreamChoice("b", finish_reason="length"), tokens=2)
    assert reply.token_times_s() == [1.0, 2.0]


def test_chat_roles_are_no_tokens():
    """The chunk that opens a chat message carries a role only."""
    reply = reply_of(
        StreamChoice(delta=StreamDelta(role="assistant")),
        StreamChoice(delta=StreamDelta(content="a")),
        StreamChoice(delta=StreamDelta(), finish_reason="stop"),
    )
    assert reply.token_times_s() == [1.0]


@given(chunks=st.integers(1, 30), extra=st.integers(0, 100))
def test_packed_chunks_keep_first_last_and_every_gap(chunks, extra):
    """With more tokens than chunks there is a time for each token, and the gaps seen are all still there."""
    reply = reply_of(*[StreamChoice("a")] * chunks, tokens=chunks + extra)
    times = reply.token_times_s()
    assert len(times) == chunks + extra
    assert sorted(set(times)) == [float(number) for number in range(chunks)]
    assert times == sorted(times)


def test_finish_reasons():
    """A length is a length, anything else a stop; without either or [DONE] the reply is not complete."""
    assert reply_of(StreamChoice("a", finish_reason="length")).finish == "length"
    assert reply_of(StreamChoice("a", finish_reason="tool_calls")).finish == "stop"
    assert not reply_of(StreamChoice("a")).complete
