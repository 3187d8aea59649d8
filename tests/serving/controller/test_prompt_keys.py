"""Block keys of prompts: equal for equal prefixes, separate by tenant and cache salt."""

import msgspec

from twofold.request import Generation, Request, SamplingParams
from twofold.serving.controller.prompt_keys import PromptKeys

BLOCK = 4


def keys(named, token_ids, tenant="", salt="", adapter=""):
    request = Request(id="r", arrival_s=0.0, prompt_tokens=len(token_ids), output_tokens=1, adapter=adapter)
    sampling = SamplingParams(max_tokens=1)
    generation = Generation(request=request, prompt_token_ids=token_ids, sampling=sampling, key=tenant)
    made = named.name(msgspec.structs.replace(generation, cache_salt=salt))
    assert not made.cache_salt, "workers do not need the salt"
    return made.request.prefix_blocks


def test_equal_prefixes_have_equal_keys():
    named = PromptKeys(BLOCK)
    first = keys(named, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = keys(named, [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4])
    assert (len(first), len(other)) == (2, 3)
    assert first[0] == other[0]
    assert len({*first, *other}) == 4


def test_tenants_have_different_keys():
    named, prompt = PromptKeys(BLOCK), list(range(40))
    tenants = [keys(named, prompt, tenant) for tenant in ("", "one", "two")]
    assert len({key for each in tenants for key in each}) == 30
    assert keys(named, prompt, "one") == tenants[1]


def test_cache_salts_separate_the_users_of_a_tenant():
    named, prompt = PromptKeys(BLOCK), list(range(40))
    asked = [("one", ""), ("one", "x"), ("one", "y"), ("two", "x"), ("", "x"), ("x", "")]
    made = [keys(named, prompt, tenant, salt) for tenant, salt in asked]
    assert len({key for each in made for key in each}) == 10 * len(asked)
    assert keys(named, prompt, "one", "x") == made[1]


def test_adapters_have_different_keys():
    named, prompt = PromptKeys(BLOCK), list(range(40))
    adapters = ["", "x", "y"]
    made = [keys(named, prompt, "one", salt, adapter) for salt in adapters for adapter in adapters]
    assert len({key for each in made for key in each}) == 10 * len(made)
    assert keys(named, prompt, "one", "x", adapters[1]) == made[4]


def test_keys_differ_between_starts():
    prompt = list(range(40))
    assert not {*keys(PromptKeys(BLOCK), prompt)} & {*keys(PromptKeys(BLOCK), prompt)}
