"""The bytes a token stands for, also where they are only a part of a character."""

import json
import re
from functools import cache

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Any text does: it only keeps the decoder from treating the token as the first of a text.
_ANCHOR = "a"


class TokenBytes:
    """Looks up the bytes of token ids and a printable name for each."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder
        kinds = _kinds(json.loads(self._decoder.__getstate__())) if self._decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        self._known: dict[int, bytes | None] = {}

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token; None for an id without one (padding of the vocabulary)."""
        if token_id not in self._known:
            piece = self._tokenizer.id_to_token(token_id)
            self._known[token_id] = None if piece is None else self._decode(piece)
        return self._known[token_id]

    def name_of(self, token_id: int) -> str:
        """The token's text; for one that is no whole text its bytes, as in `bytes:\\xe4\\xb8`."""
        raw = self.bytes_of(token_id)
        if raw is None:
            return id_name(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _decode(self, piece: str) -> bytes:
        if piece in self._added:
            return piece.encode()
        if self._byte_level:
            return _byte_level(piece)
        fallback = _BYTE_FALLBACK.fullmatch(piece) if self._byte_fallback else None
        if fallback:
            return bytes.fromhex(fallback[1])
        if self._decoder is None:
            return piece.encode()
        return str(self._decoder.decode([_ANCHOR, piece]))[len(_ANCHOR) :].encode()


def id_name(token_id: int) -> str:
    """What a token is called where its text is not known."""
    return f"token_id:{token_id}"


def _kinds(decoder: object) -> set[str]:
    """The `type` of a serialized decoder and of the decoders inside it."""
    if isinstance(decoder, list):
        return set().union(*map(_kinds, decoder))
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.values()))


def _byte_level(piece: str) -> bytes:
    """Undo the byte-level alphabet; a piece with other characters in it stands for itself."""
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return piece.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, others for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
