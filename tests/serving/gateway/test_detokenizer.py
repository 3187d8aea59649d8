"""Incremental detokenization with real tokenizers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tokenizers_for_tests import byte_fallback, byte_level
from twofold.request import FinishReason, TokenOutput
from twofold.serving.gateway.output import OutputProcessor
from twofold.serving.gateway.schemas import CompletionFields
from twofold.serving.gateway.tokenizer import Detokenizer

KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
kinds = st.sampled_from(sorted(KINDS))


def detokenize(tokenizer, token_ids, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    pieces.append(detokenizer.flush())
    return detokenizer, pieces


@given(kinds, st.data(), st.booleans())
def test_pieces_join_to_the_librarys_decoding(kind, data, skip):
    """Incremental detokenization gives the same text as decoding all tokens at once."""
    tokenizer = KINDS[kind]()
    ids = st.integers(0, tokenizer.backend.get_vocab_size() - 1)
    token_ids = data.draw(st.lists(ids, max_size=40))
    detokenizer, pieces = detokenize(tokenizer, token_ids, skip)
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.characters == len("".join(pieces))
    if kind == "byte_level" or "\ufffd" not in whole:  # byte fallback may leave a partial character
        assert "".join(pieces) == whole


@given(kinds, st.text(max_size=30))
def test_text_round_trips_in_whole_characters(kind, text):
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    _, pieces = detokenize(tokenizer, token_ids, skip=True)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_partial_characters_are_held_back(kind):
    """A partial character adds no text until it is complete; at the end of the output it becomes U+FFFD."""
    tokenizer = KINDS[kind]()
    token_ids = [tokenizer.backend.token_to_id(piece) for piece in pieces_of_smile(kind)]
    assert detokenize(tokenizer, token_ids, skip=True)[1] == ["", "", "", "😀", ""]
    cut = detokenize(tokenizer, token_ids[:2], skip=True)[1]
    assert cut[:2] == ["", ""]
    assert set(cut[2]) == {"\ufffd"}


@given(kinds, st.data(), st.lists(st.booleans(), min_size=1, max_size=4), st.sampled_from(["length", "stop"]))
def test_text_of_servers_joins_text_of_the_gateway(kind, data, from_server, reason):
    """A replay may take a stream from a server that detokenizes to one whose tokens the gateway detokenizes."""
    tokenizer = KINDS[kind]()
    ids = st.integers(0, tokenizer.backend.get_vocab_size() - 1)
    token_ids = data.draw(st.lists(ids, min_size=1, max_size=12))
    server = Detokenizer(tokenizer)
    stops = reason == "stop"  # the last token has no text
    pieces = [server.push(each) for each in token_ids[: len(token_ids) - stops]] + [""] * stops

    def text(from_server):
        fields = CompletionFields(model="m", prompt="")
        output = OutputProcessor(0, tokenizer, fields, [])
        shown = ""
        for place, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True)):
            own = not from_server[place * len(from_server) // len(token_ids)]
            ended = FinishReason(reason) if place + 1 == len(token_ids) else None
            token = TokenOutput(index=place, token_id=token_id, text=None if own else piece, finish_reason=ended)
            shown += output.push(token).text
        return shown

    assert text(from_server) == text([False])


def pieces_of_smile(kind):
    if kind == "byte_fallback":
        return [f"<0x{byte:02X}>" for byte in "😀".encode()]
    alphabet = {0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0x80: "Ģ"}  # GPT-2's characters for these bytes
    return [alphabet[byte] for byte in "😀".encode()]


def test_ids_beyond_the_vocabulary_add_no_text():
    # Models with a padded vocabulary can generate such ids.
    tokenizer = byte_level()
    hello = tokenizer.backend.encode("he").ids
    assert "".join(detokenize(tokenizer, [5000, *hello, 5001], skip=True)[1]) == "he"
