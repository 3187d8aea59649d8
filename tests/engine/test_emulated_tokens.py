"""The random tokens of the emulated engine."""

import math

from hypothesis import given
from hypothesis import strategies as st

from twofold.engine.emulated import RandomTokens
from twofold.request import SamplingParams

seeds, positions = st.integers(0, 2**63), st.integers(0, 10**6)


@given(st.integers(2, 200_000), seeds, positions)
def test_tokens_are_in_the_vocabulary(vocab_size, seed, position):
    tokens = RandomTokens(vocab_size)
    token = tokens.sample(SamplingParams(max_tokens=1, seed=seed), position, 0).token_id
    # The lowest ids may be special tokens.
    assert min(256, vocab_size // 2) <= token < vocab_size


@given(seeds, positions, st.integers(0, 3))
def test_min_tokens_excludes_stop_ids(seed, position, output_index):
    tokens = RandomTokens(1000)
    first = tokens.sample(SamplingParams(max_tokens=9, seed=seed), position, output_index).token_id
    sampling = SamplingParams(max_tokens=9, seed=seed, stop_token_ids=(first,), min_tokens=2)
    again = tokens.sample(sampling, position, output_index).token_id
    assert (again == first) == (output_index >= 2)


def test_tokens_are_uniformly_distributed():
    """All tokens have equal log probabilities."""
    sampled = RandomTokens(1000).sample(SamplingParams(max_tokens=1, logprobs=3), 4, 0)
    assert sampled.logprob == -math.log(1000 - 256)
    assert len({token for token, _ in sampled.top_logprobs}) == 3
    assert sampled.top_logprobs[0] == (sampled.token_id, sampled.logprob)


def test_zero_logprobs_return_no_alternatives():
    """With `logprobs=0`, the sampled token has a log probability, but no alternatives are reported."""
    sampled = RandomTokens(1000).sample(SamplingParams(max_tokens=1, logprobs=0), 4, 0)
    assert sampled.top_logprobs == ()
    assert sampled.logprob is not None


def test_samples_a_token_if_all_are_excluded():
    sampling = SamplingParams(max_tokens=2, min_tokens=2, stop_token_ids=(1,))
    assert RandomTokens(2).sample(sampling, 0, 0).token_id == 1


def test_stop_ids_become_a_set_once():
    """The stop ids of a request are not walked again for each of its tokens."""
    walks = []

    class Ids(tuple):
        __slots__ = ()

        def __iter__(self):
            walks.append(self)
            return super().__iter__()

    sampling = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=Ids(range(300, 340)))
    for position in range(5):
        RandomTokens(1000).sample(sampling, position, position)
    assert len(walks) == 1
