"""Keys of prompts: equal where a tenant's prompts begin alike, and nowhere else."""

import msgspec

from twofold.request import Generation, Request, SamplingParams
from twofold.serving.controller.prompt_keys import PromptKeys

BLOCK = 4


def keys(named, token_ids, tenant="", salt=""):
    request = Request(id="r", arrival_s=0.0, prompt_tokens=len(token_ids), output_tokens=1)
    sampling = SamplingParams(max_tokens=1)
    generation = Generation(request=request, prompt_token_ids=token_ids, sampling=sampling, key=tenant)
    made = named.name(msgspec.structs.replace(generation, cache_salt=salt))
    assert not made.cache_salt, "no worker needs it"
    return made.request.prefix_blocks


def test_prompts_that_begin_alike_share_keys_until_they_differ():
    """One key for each full block; the same tokens after a difference have others."""
    named = PromptKeys(BLOCK)
    first = keys(named, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = keys(named, [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4])
    assert (len(first), len(other)) == (2, 3)
    assert first[0] == other[0]
    assert len({*first, *other}) == 4


def test_tenants_share_none():
    """The same prompt has other keys with another API key, and without any."""
    named, prompt = PromptKeys(BLOCK), list(range(40))
    tenants = [keys(named, prompt, tenant) for tenant in ("", "one", "two")]
    assert len({key for each in tenants for key in each}) == 30
    assert keys(named, prompt, "one") == tenants[1]


def test_users_of_a_tenant_share_none_where_it_salts_them():
    """Nor does another tenant that says the same salt."""
    named, prompt = PromptKeys(BLOCK), list(range(40))
    asked = [("one", ""), ("one", "x"), ("one", "y"), ("two", "x"), ("", "x"), ("x", "")]
    made = [keys(named, prompt, tenant, salt) for tenant, salt in asked]
    assert len({key for each in made for key in each}) == 10 * len(asked)
    assert keys(named, prompt, "one", "x") == made[1]


def test_keys_of_another_start_are_others():
    """So nothing that was seen of one service says anything about another, or about the same one later."""
    prompt = list(range(40))
    assert not {*keys(PromptKeys(BLOCK), prompt)} & {*keys(PromptKeys(BLOCK), prompt)}
