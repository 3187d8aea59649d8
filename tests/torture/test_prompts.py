"""Prompts of the fault suite."""

import pytest

from twofold.bench.prompts import PromptMaker
from twofold.errors import ConfigurationError
from twofold.torture.faults import KillCommand, parse_kill
from twofold.torture.prompts import torture_prompts


def test_prompts_end_beside_edges_of_blocks_and_half_of_them_begin_alike():
    prompts = [each.prompt for each in torture_prompts(PromptMaker(block_tokens=16), 24, 200, 8)]
    assert [len(prompt) % 16 for prompt in prompts] == [15, 0, 1] * 8
    assert max(map(len, prompts)) <= 200
    assert len({tuple(prompt[:15]) for prompt in prompts}) == 13  # one of 12 prompts, and 12 others


def test_a_longest_prompt_of_a_block_is_refused():
    with pytest.raises(ConfigurationError, match="no room for a block of 16 tokens"):
        torture_prompts(PromptMaker(block_tokens=16), 4, 16, 8)


@pytest.mark.parametrize(
    ("text", "kill"),
    [
        ("decode=kill -9 7", KillCommand("decode", "kill -9 7")),
        ("kill -9 7", KillCommand("kill -9 7", "kill -9 7")),
        ("curl 'http://a/?b=c'", KillCommand("curl 'http://a/?b=c'", "curl 'http://a/?b=c'")),
    ],
)
def test_commands_may_have_a_name(text, kill):
    assert parse_kill(text) == kill
