"""Tests of the prompts of the benchmark client."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.bench.prompts import PromptForm, PromptMaker, token_range
from twofold.request import Request


def ask(name="a", prompt_tokens=40, blocks=()):
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=1, prefix_blocks=blocks)


@given(length=st.integers(1, 3000), blocks=st.lists(st.integers(0, 9), max_size=6), seed=st.integers(0, 99))
def test_token_prompts_have_the_exact_length_and_stay_in_range(length, blocks, seed):
    maker = PromptMaker(seed=seed, lowest=10, vocabulary=20)
    ids = maker.token_ids(ask(prompt_tokens=length, blocks=tuple(blocks)))
    assert len(ids) == length
    assert all(10 <= token < 20 for token in ids)


def test_same_seed_and_request_give_the_same_prompt():
    """Equal seeds and request ids give equal prompts; another seed gives another prompt."""
    assert PromptMaker(seed=3).prompt(ask()) == PromptMaker(seed=3).prompt(ask())
    assert PromptMaker(seed=3).prompt(ask()) != PromptMaker(seed=4).prompt(ask())


def test_another_salt_changes_all_of_a_prompt_but_the_shared_prefix():
    blocks = ask(prompt_tokens=1200, blocks=(7,))
    one, two = (PromptMaker(salt=salt, shared_prefix=100).token_ids(blocks) for salt in ("one", "two"))
    assert one[:100] == two[:100]
    assert one[100:116] != two[100:116]
    assert one[612:] != two[612:]
    assert len(one) == len(two) == 1200


def test_a_shared_prefix_is_not_longer_than_the_prompt():
    assert len(PromptMaker(shared_prefix=100).token_ids(ask(prompt_tokens=40))) == 40


def test_requests_share_no_prefix_by_default():
    """No two prompts begin with the same block of 16 tokens."""
    maker = PromptMaker()
    starts = {tuple(maker.token_ids(ask(str(number)))[:16]) for number in range(500)}
    assert len(starts) == 500


def test_equal_blocks_give_equal_tokens_and_the_rest_differs():
    maker = PromptMaker(block_tokens=32)
    one = maker.token_ids(ask("one", 100, (7, 8, 1)))
    two = maker.token_ids(ask("two", 100, (7, 8, 2)))
    assert one[:64] == two[:64]
    assert one[64:96] != two[64:96]
    assert one[96:] != two[96:]


def test_a_prompt_that_ends_inside_a_block_is_the_start_of_that_block():
    maker = PromptMaker(block_tokens=32)
    assert maker.token_ids(ask("one", 40, (7, 8))) == maker.token_ids(ask("two", 64, (7, 8)))[:40]


def test_text_prompts_have_one_word_per_token():
    maker = PromptMaker(form=PromptForm.TEXT, block_tokens=16)
    one, two = (str(maker.prompt(ask(name, 20, (5,)))).split() for name in ("one", "two"))
    assert len(one) == len(two) == 20
    assert one[:16] == two[:16]
    assert one[16:] != two[16:]


def test_token_range_fits_small_vocabularies():
    assert token_range(300) == (150, 300)
    assert token_range(50_000) == (256, 50_000)
    assert token_range(None) == (256, 1024)


def test_block_names_may_be_hashes():
    maker = PromptMaker(block_tokens=32)
    one, two = (maker.token_ids(ask(name, 64, (b"same", name.encode()))) for name in ("one", "two"))
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]
