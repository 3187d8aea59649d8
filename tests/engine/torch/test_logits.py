"""Bias, penalties and excluded tokens, against formulas on lists and against transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from twofold.engine.torch.logits import SamplingRow, adjusted, adjusts
from twofold.engine.torch.sampler import sample
from twofold.request import SamplingParams

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
PENALTIES = st.floats(-2, 2)


def logits_of(seed):
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def row(prompt, output, resumed=0, **values):
    """Return the row of a request whose first `resumed` output tokens come from earlier attempts."""
    sampling = SamplingParams(max_tokens=99, resumed_tokens=resumed, **values)
    history = (*prompt, *output)
    return SamplingRow(sampling, len(history), len(output) - resumed, history if sampling.needs_history else ())


@given(st.integers(0, 99), TOKENS, TOKENS, PENALTIES, PENALTIES)
def test_presence_and_frequency_count_the_output_alone(seed, prompt, output, presence, frequency):
    logits = logits_of(seed)
    changed = adjusted(logits, row(prompt, output, presence_penalty=presence, frequency_penalty=frequency), ())
    wanted = [score - frequency * output.count(i) - presence * (i in output) for i, score in enumerate(logits.tolist())]
    assert changed.tolist() == pytest.approx(wanted, abs=1e-5)


@given(st.integers(0, 99), TOKENS, TOKENS, st.floats(0.1, 10))
def test_repetition_counts_prompt_and_output(seed, prompt, output, penalty):
    logits = logits_of(seed)
    changed = adjusted(logits, row(prompt, output, repetition_penalty=penalty), ())
    seen = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits[None].clone())[0]
    assert torch.allclose(changed, wanted)


@given(st.integers(0, 99), TOKENS, TOKENS, st.data())
def test_changes_do_not_depend_on_the_attempts(seed, prompt, output, data):
    """A request resumed after any number of its tokens gets the same logits."""
    values = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.3,
        "logit_bias": ((3, 2.0),),
        "bad_word_ids": ((1,), (2, 3)),
    }
    resumed = data.draw(st.integers(0, len(output)))
    first, again = (row(prompt, output, made, **values) for made in (0, resumed))
    assert torch.equal(adjusted(logits_of(seed), first, ()), adjusted(logits_of(seed), again, ()))


@given(TOKENS, TOKENS, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4))
def test_bad_words_are_excluded_where_they_would_end(prompt, output, words):
    changed = adjusted(torch.zeros(VOCABULARY), row(prompt, output, bad_word_ids=tuple(map(tuple, words))), ())
    for token in range(VOCABULARY):
        longer = [*output, token]
        excluded = any(longer[len(longer) - len(word) :] == word for word in words if len(word) <= len(longer))
        assert (changed[token] == float("-inf")) == excluded


def test_a_bias_is_added_before_penalties():
    changed = adjusted(
        torch.zeros(VOCABULARY), row([3], [], repetition_penalty=2.0, logit_bias=((3, 5.0), (4, -1.0))), ()
    )
    assert changed.tolist() == [0.0, 0.0, 0.0, 2.5, -1.0] + [0.0] * 7


def test_log_probabilities_are_those_of_the_model():
    """Biases and penalties change the tokens, but not the reported log probabilities."""
    logits = logits_of(1)[None]
    biased = row([1], [2], temperature=0.0, logprobs=1, logit_bias=((5, 100.0),), presence_penalty=1.0)
    (sampled,) = sample(logits, [biased], ())
    assert sampled.token_id == 5
    assert sampled.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[5]))
    assert sampled.top_logprobs[0][0] == int(logits.argmax())


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_p": 0.5, "min_p": 0.5}, False),
        ({"min_tokens": 3}, True),
        ({"min_tokens": 2}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": ((1, 1.0),)}, True),
        ({"bad_word_ids": ((1,),)}, True),
    ],
)
def test_plain_requests_are_not_changed(values, changes):
    assert adjusts(row([1, 2], [3, 4], **values)) is changes
