"""Tokens and sampling parameters of a request on a worker."""

from twofold.request import SamplingParams
from twofold.serving.worker.state import TokenSequence


def test_an_output_ends_with_eos_or_a_stop_token():
    eos = frozenset({1})
    sequence = TokenSequence(SamplingParams(max_tokens=3, stop_token_ids=(5, 7)))
    assert [token for token in range(10) if sequence.ends_with(token, eos)] == [1, 5, 7]
    passing = TokenSequence(SamplingParams(max_tokens=3, stop_token_ids=(5, 7), ignore_eos=True))
    assert [token for token in range(10) if passing.ends_with(token, eos)] == [5, 7]


def test_stop_tokens_are_found_without_a_walk_over_them():

    class Unwalked(tuple):
        __slots__ = ()

        def __contains__(self, token):
            raise AssertionError("each token walks over all stop tokens")

    sequence = TokenSequence(SamplingParams(max_tokens=3, stop_token_ids=Unwalked((5, 7))))
    assert sequence.ends_with(7, frozenset())
