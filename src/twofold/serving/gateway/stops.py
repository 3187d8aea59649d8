"""Stop strings: found across token boundaries, and never shown to the client before they are ruled out."""

from collections.abc import Sequence

import msgspec


class StopText(msgspec.Struct, frozen=True):
    """Text that may be given out, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Watches one text for stop strings; the text may come in pieces of any size.

    The stop string that is complete first ends the text; of two complete at the same character, the longer.
    So the result depends on the text alone, not on how it was cut. Each stop string is matched by a
    Knuth-Morris-Pratt automaton, which costs the same for every character whatever the stop strings are.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` keeps the stop string at the end of the text; the stop strings must not be empty."""
        # Longest first, so that it wins over a shorter one complete at the same character.
        self._automata = [
            _Automaton(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))
        ]
        self._include = include
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> StopText:
        """Add a piece; while not `armed` no stop string may end in it, though one may begin in it."""
        if not self._automata:
            return StopText(piece)
        text = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            complete = [automaton for automaton in self._automata if automaton.advance(char)]
            if complete and armed:
                stop = complete[0].pattern
                self._held = ""
                return StopText(text[: end if self._include else end - len(stop)], stop)
        keep = len(text) - max(automaton.matched for automaton in self._automata)
        self._held = text[keep:]
        return StopText(text[:keep])

    def flush(self) -> str:
        """The text held back, once it is known that no more will come."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: `matched` characters of `pattern` are the end of the text seen so far."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        # _fallback[k]: the longest proper prefix of pattern that is also a suffix of its first k characters.
        self._fallback = [0] * (len(pattern) + 1)
        length = 0
        for position in range(1, len(pattern)):
            while length and pattern[position] != pattern[length]:
                length = self._fallback[length]
            length += pattern[position] == pattern[length]
            self._fallback[position + 1] = length

    def advance(self, char: str) -> bool:
        """Take one character; True where the pattern ends with it."""
        while self.matched and self.pattern[self.matched] != char:
            self.matched = self._fallback[self.matched]
        self.matched += self.pattern[self.matched] == char
        if self.matched < len(self.pattern):
            return False
        self.matched = self._fallback[self.matched]
        return True
