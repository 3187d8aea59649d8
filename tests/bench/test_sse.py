"""Tests of the parser of server-sent events."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from twofold.bench.client import EventSplitter, decode_event

STREAM = b'data: {"a": 1}\n\n: a comment\r\ndata:{"b": 2}\r\n\r\nevent: x\ndata: [DONE]\n\n'


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_cuts_do_not_change_the_events(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    splitter = EventSplitter()
    data = [part for start, end in pairwise(edges) for part in splitter.feed(STREAM[start:end])]
    assert data == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_a_last_line_without_newline_is_not_lost():
    """A stream may end right after [DONE], without a newline."""
    splitter = EventSplitter()
    assert splitter.feed(b"data: [DONE]") == []
    assert splitter.close() == [b"[DONE]"]


def test_recognizes_every_form_of_error():
    assert decode_event(b'{"error": {"message": "full", "code": 503}}').error_message == "full"
    assert decode_event(b'{"error": "full"}').error_message == "full"
    assert decode_event(b'{"object": "error", "message": "full"}').error_message == "full"
    assert decode_event(b'{"choices": [], "error": null}').error_message is None


def test_recognizes_output_text():
    lines = (
        b'{"choices": [{"text": "x"}]}',
        b'{"choices": [{"delta": {"content": "x"}}]}',
        b'{"choices": [{"delta": {"reasoning_content": "x"}}]}',
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"text": ""}]}',
    )
    assert [decode_event(line).choices[0].has_text for line in lines] == [True, True, True, False, False]
