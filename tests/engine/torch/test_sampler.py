"""Sampling: greedy, seeded, top-k, top-p and log probabilities."""

import math
import random

import pytest
import torch

from support.engine_driver import drive, token_ids
from twofold.engine.torch.logits import SamplingRow
from twofold.engine.torch.sampler import sample
from twofold.request import SamplingParams

VOCABULARY = 16
EOS = (2,)


def logits_of(rows=1, seed=0, spread=2.0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def row(position=10, output_index=0, **values):
    return SamplingRow(SamplingParams(max_tokens=100, **values), position, output_index)


def tokens(logits, rows):
    return [sampled.token_id for sampled in sample(logits, rows, EOS)]


def draw_many(count, logits, **values):
    """Sample a token at each of `count` positions from the same logits; return the token ids."""
    rows = [row(position, **values) for position in range(count)]
    return tokens(logits.expand(count, -1), rows)


def chi_square(drawn, probabilities):
    count = len(drawn)
    return sum((drawn.count(i) - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities) if p > 0)


def test_greedy_takes_the_best():
    logits = logits_of(5)
    assert tokens(logits, [row(temperature=0.0)] * 5) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    logits = logits_of()
    probabilities = torch.softmax(logits[0] / temperature, -1).tolist()
    # A correct sampler exceeds a statistic of 45 only once in 10,000 runs.
    assert chi_square(draw_many(4000, logits, temperature=temperature), probabilities) < 45


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = logits_of()
    probabilities = torch.softmax(logits[0], -1)
    best, ids = probabilities.sort(descending=True)
    count = int((best.cumsum(0) < 0.7).sum()) + 1
    cut = torch.zeros(VOCABULARY).index_copy(0, ids[:count], best[:count] / best[:count].sum())
    drawn = draw_many(4000, logits, top_p=0.7)
    assert set(drawn) == set(ids[:count].tolist())
    assert chi_square(drawn, cut.tolist()) < 45


def test_top_p_beyond_the_likely_tokens():
    logits = torch.zeros(1, 5000).index_fill(1, torch.tensor([7]), 1.0)
    drawn = draw_many(300, logits, top_p=0.9)
    # The sampler sorts only the 256 likeliest tokens at first.
    assert len(set(drawn)) > 256


def test_top_k_and_top_p_together():
    """top_k is applied first, and top_p is applied to the remaining distribution."""
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert set(draw_many(500, logits, top_k=3)) == {0, 1, 2}
    assert set(draw_many(500, logits, top_k=2, top_p=0.5)) == {0}
    assert set(draw_many(500, logits, top_k=100)) == {0, 1, 2, 3}


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_is_relative_to_the_best(min_p):
    logits = logits_of()
    probabilities = torch.softmax(logits[0], -1)
    kept = torch.where(probabilities >= min_p * probabilities.max(), probabilities, 0.0)
    drawn = draw_many(4000, logits, min_p=min_p)
    assert set(drawn) <= set(kept.nonzero()[:, 0].tolist())
    assert chi_square(drawn, (kept / kept.sum()).tolist()) < 45


def test_min_p_comes_before_top_p():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1]]))
    # Without the last two tokens, the first has 62.5%.
    assert set(draw_many(500, logits, min_p=0.5, top_p=0.6)) == {0}
    assert set(draw_many(500, logits, top_p=0.6)) == {0, 1}


def test_top_k_of_one_is_greedy():
    logits = logits_of(20)
    drawn = tokens(logits, [row(i, temperature=5.0, top_k=1) for i in range(20)])
    assert drawn == logits.argmax(-1).tolist()


def test_tiny_top_p_is_greedy():
    logits = logits_of(20)
    assert tokens(logits, [row(i, top_p=1e-9) for i in range(20)]) == logits.argmax(-1).tolist()


def test_noise_is_a_function_of_seed_and_position():
    """A sampled token depends on seed and position, but not on the other rows of the batch or their order."""
    logits = logits_of(8)
    rows = [row(position=i % 4, seed=i // 4) for i in range(8)]
    together = tokens(logits, rows)
    assert together == [tokens(logits[i : i + 1], [rows[i]])[0] for i in range(8)]
    assert together[::-1] == tokens(logits.flip(0), rows[::-1])
    flat = torch.zeros(1, 1000)
    assert len({tokens(flat, [row(p, seed=s)])[0] for p in range(10) for s in range(10)}) > 80


def test_noise_is_the_same_in_all_releases():
    """A seed gives the same tokens in all releases of Twofold."""
    flat = torch.zeros(1, 50_000)
    keys = ((0, 0), (1, 0), (0, 1), (4096, 2**63 - 1))
    # Otherwise, another release of Twofold could not replay a request.
    assert [tokens(flat, [row(p, seed=s)])[0] for p, s in keys] == [26614, 43756, 5290, 27664]


class TestMinTokens:
    """EOS and stop ids are masked until the output has `min_tokens` tokens."""

    def test_eos_and_stop_ids_wait(self):
        logits = torch.zeros(1, VOCABULARY).index_fill(1, torch.tensor([2, 5]), 9.0)
        early, late = (
            {
                tokens(logits, [row(p, i, min_tokens=3, stop_token_ids=(5,), temperature=t)])[0]
                for p in range(20)
                for t in (0.0, 1.0)
            }
            for i in (2, 3)
        )
        assert not early & {2, 5}
        assert late <= {2, 5}

    def test_ignored_eos_is_not_masked(self):
        logits = torch.zeros(1, VOCABULARY).index_fill(1, torch.tensor([2]), 9.0)
        assert tokens(logits, [row(min_tokens=3, ignore_eos=True, temperature=0.0)]) == [2]

    def test_stop_ids_become_a_tensor_once(self, monkeypatch):
        """The stop ids of a request are not converted again for each of its tokens."""
        made, create = [], torch.tensor

        def counted(data, **options):
            made.append(data)
            return create(data, **options)

        logits, stops = torch.zeros(1, VOCABULARY), tuple(range(3, 14))
        monkeypatch.setattr(torch, "tensor", counted)
        rows = [row(position, min_tokens=9, stop_token_ids=stops, temperature=0.0) for position in range(5)]
        assert not {tokens(logits, [each])[0] for each in rows} & set(stops)
        assert len([data for data in made if len(data) >= len(stops)]) == 1

    def test_logits_are_not_modified(self):
        """Masked stop ids do not change the reported log probabilities."""
        logits = torch.zeros(1, VOCABULARY).index_fill(1, torch.tensor([2]), 9.0)
        sampled = sample(logits, [row(min_tokens=3, temperature=0.0, logprobs=1)], EOS)[0]
        assert sampled.token_id != 2
        assert sampled.top_logprobs[0][0] == 2
        assert sampled.logprob == pytest.approx(float(torch.log_softmax(logits, -1)[0, sampled.token_id]))


class TestLogprobs:
    """Log probabilities are natural logarithms of the model's probabilities at temperature 1."""

    def test_chosen_and_best(self):
        logits = logits_of(3)
        expected = torch.log_softmax(logits, -1)
        rows = [row(0, logprobs=3, temperature=0.3), row(1), row(2, logprobs=0, temperature=0.0)]
        first, second, third = sample(logits, rows, EOS)
        assert first.logprob == pytest.approx(float(expected[0, first.token_id]))
        best = expected[0].topk(3)
        assert [token for token, _ in first.top_logprobs] == best.indices.tolist()
        assert [p for _, p in first.top_logprobs] == pytest.approx(best.values.tolist())
        assert (second.logprob, second.top_logprobs) == (None, ())
        assert third.logprob == pytest.approx(float(expected[2].max()))
        assert third.top_logprobs == ()

    def test_more_than_the_vocabulary_has(self):
        sampled = sample(logits_of(), [row(logprobs=100)], EOS)[0]
        assert len(sampled.top_logprobs) == VOCABULARY
        assert math.isclose(sum(math.exp(p) for _, p in sampled.top_logprobs), 1.0, rel_tol=1e-5)

    def test_half_precision_is_normalised_in_float32(self):
        sampled = sample(logits_of().bfloat16(), [row(logprobs=VOCABULARY)], EOS)[0]
        assert math.isclose(sum(math.exp(p) for _, p in sampled.top_logprobs), 1.0, rel_tol=1e-5)


def test_samples_do_not_depend_on_the_batch(engine):
    """A request gets the same sampled tokens if it runs alone, in a batch of eight requests, or in chunks."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 512) for _ in range(rng.randrange(1, 120))] for _ in range(8)]
    params = [
        SamplingParams(max_tokens=15, seed=100 + i, temperature=0.8, top_p=0.95 if i % 2 else 1.0, top_k=i * 10)
        for i in range(8)
    ]
    together = token_ids(drive(engine(), prompts, params))
    alone = [token_ids(drive(engine(), prompts[i : i + 1], params[i : i + 1]))[0] for i in range(8)]
    chunked = token_ids(drive(engine(), prompts, params, chunk=lambda: 13, max_batch=3, seed=9))
    assert together == alone == chunked
    other = [SamplingParams(max_tokens=15, seed=7, temperature=0.8)] * 8
    assert token_ids(drive(engine(), prompts, other)) != together


@pytest.mark.covers(engine="torch", feature="logprobs")
def test_engine_logprobs_are_those_of_the_model(engine, tiny_model_dir):
    """The log probabilities of all output tokens equal the results of a forward pass in transformers."""
    from transformers import AutoModelForCausalLM

    prompt = [5, 77, 200, 31]
    params = SamplingParams(max_tokens=10, temperature=0.7, seed=4, logprobs=5)
    output = drive(engine(), [prompt], params)[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), attn_implementation="eager").eval()
    ids = prompt + [sampled.token_id for sampled in output]
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    for i, sampled in enumerate(output, len(prompt) - 1):
        assert sampled.logprob == pytest.approx(float(expected[i, sampled.token_id]), abs=1e-4)
        best = expected[i].topk(5)
        assert [token for token, _ in sampled.top_logprobs] == best.indices.tolist()
        assert [p for _, p in sampled.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
