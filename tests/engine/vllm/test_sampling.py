"""The logits processor with which vLLM samples the same tokens as the torch engine."""

import torch
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from twofold.engine.torch.logits import SamplingRow
from twofold.engine.torch.sampler import pick
from twofold.engine.vllm.sampling import KeyedSampling, vllm_sampling
from twofold.request import SamplingParams

VOCABULARY = 50
DRAWN = SamplingParams(max_tokens=9, seed=3, temperature=0.8, top_p=0.9)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def processor():
    return KeyedSampling(None, torch.device("cpu"), is_pin_memory=False)


def added(index, sampling, prompt, output):
    return index, vllm_sampling(sampling, len(prompt), 9, frozenset({1})), prompt, output


def update(size, added=(), removed=(), moved=()):
    return BatchUpdate(batch_size=size, removed=removed, added=added, moved=moved)


def expected(logits, sampling, position, output_index=0):
    return pick(logits[None], [SamplingRow(sampling, position, output_index)], (1,))[0]


def test_masks_all_but_the_sampled_token():
    one, output = processor(), []
    one.update_state(update(2, [added(0, DRAWN, [5, 6, 7], output), added(1, GREEDY, [5], [])]))
    for made in range(4):
        logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(made))
        got = one.apply(logits.clone())
        assert got[0].argmax() == expected(logits[0], DRAWN, 3 + made, made)
        assert torch.isfinite(got[0]).sum() == 1
        assert torch.equal(got[1], logits[1])
        output.append(int(got[0].argmax()))


def test_rows_follow_their_requests_through_the_batch():
    """Each request keeps its own sampling parameters when vLLM removes, moves and swaps rows of the batch."""
    one = processor()
    prompts = [[5] * n for n in (2, 4, 8)]
    one.update_state(update(3, [added(i, DRAWN, prompt, []) for i, prompt in enumerate(prompts)]))
    one.update_state(update(2, removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(9))
    got = one.apply(logits.clone())
    assert [int(row.argmax()) for row in got[:2]] == [expected(logits[0], DRAWN, 8), expected(logits[1], DRAWN, 4)]
    assert torch.equal(got[2], logits[2]), "nobody is there any more"
    one.update_state(update(2, moved=[(0, 1, MoveDirectionality.SWAP)]))
    got = one.apply(logits.clone())
    assert [int(row.argmax()) for row in got[:2]] == [expected(logits[0], DRAWN, 4), expected(logits[1], DRAWN, 8)]


def test_min_tokens_counts_output_of_other_workers():
    """Output tokens that another worker generated count towards `min_tokens`, although vLLM treats them as prompt."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 1] = 9.0  # the EOS token
    for output_elsewhere, ends in ((0, False), (1, False), (2, True)):
        one = processor()
        params = vllm_sampling(sampling, 3, 9, frozenset({1}))
        one.update_state(update(1, [(0, params, [5] * (3 + output_elsewhere), [])]))
        assert (int(one.apply(logits.clone())[0].argmax()) == 1) is ends


def test_penalties_see_tokens_of_other_workers():
    """Penalties count prompt and output as the request has them, although vLLM treats earlier output as prompt."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=2.0, bad_word_ids=((7, 8),))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5], logits[0, 8], logits[0, 9] = 4.0, 3.0, 2.5
    wanted = {
        (5, 6): 5,  # token 5 of the prompt has no presence penalty
        (6, 5): 8,  # of the output, it has
        (5, 7): 5,
        (6, 5, 7): 9,  # 7 and 8 together are excluded
    }
    for tokens, token in wanted.items():
        for made_here in range(len(tokens)):
            here = len(tokens) - made_here
            one, params = processor(), vllm_sampling(sampling, 1, 9, frozenset({1}))
            one.update_state(update(1, [(0, params, list(tokens[:here]), list(tokens[here:]))]))
            assert int(one.apply(logits.clone())[0].argmax()) == token, (tokens, made_here)


def test_stop_ids_include_eos_unless_ignored():
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(7,))
    assert vllm_sampling(sampling, 1, 9, frozenset({1, 2})).stop_token_ids == [1, 2, 7]
    passing = SamplingParams(max_tokens=9, stop_token_ids=(7,), ignore_eos=True)
    assert vllm_sampling(passing, 1, 9, frozenset({1, 2})).stop_token_ids == [7]
