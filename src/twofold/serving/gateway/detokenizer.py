"""Token ids to text as they come, holding back what is not yet a whole character."""

from twofold.serving.gateway.tokenizer import TextTokenizer


class Detokenizer:
    """One output's text; the pieces joined equal the tokenizer's decoding of all its tokens.

    There is one exception. Where a tokenizer falls back to bytes, as that of Llama 2 does, and a run of
    bytes is not UTF-8, the library turns the whole run into U+FFFD. Here the characters before the first
    wrong byte are kept, because they were given out before it came.
    """

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._spoken = 0  # how many of them are in the pieces given out
        self._pieces: list[str] = []
        self.characters = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is whole with it, often one token's, sometimes none."""
        self._token_ids.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # noqa: BLE001 the library raises no narrower kind
            # The decoder rewrote text already given out (a few clean up spaces backwards): go on from here.
            self._stream = self._tokenizer.stream(skip_special_tokens=self._skip)
            piece = self._stream.step(self._tokenizer.backend, token_id)
        return self._give(piece or "")

    def flush(self) -> str:
        """The rest of the text: bytes that never became a character come out as U+FFFD."""
        if self._spoken == len(self._token_ids):
            return ""
        given = "".join(self._pieces)
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip)
        if whole.startswith(given):
            return self._give(whole[len(given) :])
        rest = self._token_ids[self._spoken :]
        return self._give(self._tokenizer.decode(rest, skip_special_tokens=self._skip))

    def _give(self, piece: str) -> str:
        if piece:
            self._spoken = len(self._token_ids)
            self._pieces.append(piece)
            self.characters += len(piece)
        return piece
