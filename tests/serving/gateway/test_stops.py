"""Matching of stop strings in streamed text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from twofold.serving.gateway.output import StopStrings, stop_patterns

texts = st.text(alphabet="aab€", max_size=24)
stops = st.lists(st.text(alphabet="aab€", min_size=1, max_size=5), max_size=4)


def pieces_of(text, cuts):
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(edges)]


def naive(text, stop_strings, include, unarmed=0):
    """Search a text for stop strings with a slow but simple reference algorithm."""
    for end in range(unarmed + 1, len(text) + 1):
        for stop in sorted(stop_strings, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces, stop_strings, include, unarmed_pieces=0):
    watcher = StopStrings(stop_patterns(stop_strings), include=include)
    shown = []
    for number, piece in enumerate(pieces):
        found = watcher.push(piece, armed=number >= unarmed_pieces)
        shown.append(found.text)
        if found.stop is not None:
            return shown, found.stop
    return [*shown, watcher.flush()], None


@given(texts, stops, st.lists(st.integers(0, 50)), st.booleans())
def test_result_does_not_depend_on_the_pieces(text, stop_strings, cuts, include):
    shown, stop = run(pieces_of(text, cuts), stop_strings, include)
    assert ("".join(shown), stop) == naive(text, stop_strings, include)


@given(texts, texts, stops, st.lists(st.integers(0, 50)), st.booleans())
def test_stop_strings_may_start_before_min_tokens(before, after, stop_strings, cuts, include):
    early = pieces_of(before, cuts)
    shown, stop = run([*early, *pieces_of(after, cuts)], stop_strings, include, len(early))
    assert ("".join(shown), stop) == naive(before + after, stop_strings, include, len(before))


@given(texts, stops, st.lists(st.integers(0, 50)))
def test_emitted_text_is_a_prefix_of_the_result(text, stop_strings, cuts):
    shown, _ = run(pieces_of(text, cuts), stop_strings, include=False)
    final = naive(text, stop_strings, include=False)[0]
    assert all(final.startswith("".join(shown[:count])) for count in range(len(shown)))


def test_holds_back_only_partial_matches():
    watcher = StopStrings(stop_patterns(["END"]))
    assert [watcher.push(piece).text for piece in ("one E", "N", " two EN")] == ["one ", "", "EN two "]
    assert watcher.flush() == "EN"


def test_the_longest_of_two_simultaneous_matches_wins():
    assert run(["xabc"], ["bc", "abc"], include=False) == (["x"], "abc")
