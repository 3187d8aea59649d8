"""The tokens of an emulated model."""

import math

from hypothesis import given
from hypothesis import strategies as st

from twofold.engine.emulated.engine import RandomTokens
from twofold.request import SamplingParams

seeds, positions = st.integers(0, 2**63), st.integers(0, 10**6)


@given(st.integers(2, 200_000), seeds, positions)
def test_tokens_are_in_the_vocabulary(vocab_size, seed, position):
    """And not among its first, which may be special."""
    tokens = RandomTokens(vocab_size)
    token = tokens.sample(SamplingParams(max_tokens=1, seed=seed), position, 0).token_id
    assert min(256, vocab_size // 2) <= token < vocab_size


@given(seeds, positions, st.integers(0, 3))
def test_an_output_does_not_end_before_it_may(seed, position, output_index):
    """A stop id is drawn like any other, but not before `min_tokens`."""
    tokens = RandomTokens(1000)
    first = tokens.sample(SamplingParams(max_tokens=9, seed=seed), position, output_index).token_id
    sampling = SamplingParams(max_tokens=9, seed=seed, stop_token_ids=(first,), min_tokens=2)
    again = tokens.sample(sampling, position, output_index).token_id
    assert (again == first) == (output_index >= 2)


def test_every_token_is_equally_likely():
    """The log probabilities say so, and the token is among its alternatives."""
    sampled = RandomTokens(1000).sample(SamplingParams(max_tokens=1, logprobs=3), 4, 0)
    assert sampled.logprob == -math.log(1000 - 256)
    assert len({token for token, _ in sampled.top_logprobs}) == 3
    assert sampled.top_logprobs[0] == (sampled.token_id, sampled.logprob)


def test_no_alternative_is_given_where_none_is_asked_for():
    """`logprobs` 0 asks for the token's own only."""
    sampled = RandomTokens(1000).sample(SamplingParams(max_tokens=1, logprobs=0), 4, 0)
    assert sampled.top_logprobs == ()
    assert sampled.logprob is not None


def test_all_tokens_ruled_out():
    """A vocabulary without any token that may be sampled gives one all the same."""
    sampling = SamplingParams(max_tokens=2, min_tokens=2, stop_token_ids=(1,))
    assert RandomTokens(2).sample(sampling, 0, 0).token_id == 1
