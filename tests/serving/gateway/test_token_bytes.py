"""Bytes and printable names of tokens, for log probabilities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tokenizers_for_tests import byte_fallback, byte_level


@given(st.lists(st.integers(2, 399), max_size=30))
def test_byte_level_bytes_join_to_the_text(token_ids):
    tokenizer = byte_level()
    raw = b"".join(tokenizer.bytes.bytes_of(token_id) or b"" for token_id in token_ids)
    assert raw.decode(errors="replace") == tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("piece", "raw", "name"),
    [
        ("<0xF0>", b"\xf0", "bytes:\\xf0"),
        ("<0x41>", b"A", "A"),
        ("▁the", b" the", " the"),
        ("世", "世".encode(), "世"),
        ("</s>", b"</s>", "</s>"),
    ],
)
def test_byte_fallback_tokens(piece, raw, name):
    tokens = byte_fallback().bytes
    token_id = byte_fallback().backend.token_to_id(piece)
    assert (tokens.bytes_of(token_id), tokens.name_of(token_id)) == (raw, name)


def test_added_token_stands_for_itself():
    """The bytes of an added token are its text in UTF-8."""
    tokenizer = byte_level()
    assert tokenizer.bytes.bytes_of(tokenizer.backend.token_to_id("<tool call>")) == b"<tool call>"


def test_unknown_ids_are_named_by_number():
    tokens = byte_level().bytes
    assert (tokens.bytes_of(9999), tokens.name_of(9999)) == (None, "token_id:9999")
