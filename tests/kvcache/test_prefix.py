"""Block keys: chained hashes of a prompt's blocks."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.kvcache.prefix import prefix_keys, tenant_salt

tokens = st.lists(st.integers(0, 200_000), max_size=60)


@given(tokens, tokens, st.integers(1, 8))
def test_keys_match_exactly_for_common_prefixes(left, right, size):
    pairs = zip(prefix_keys(left, size), prefix_keys(right, size), strict=False)
    for i, (key_left, key_right) in enumerate(pairs):
        end = (i + 1) * size
        assert (key_left == key_right) == (left[:end] == right[:end])


@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_keys_and_salts_separate_tenants(ids, size):
    keys = list(prefix_keys(ids, size))
    assert len(keys) == len(ids) // size
    assert not set(keys) & set(prefix_keys(ids, size, salt=b"tenant"))


@given(st.text(), st.text(), st.text(), st.text())
def test_salts_differ_by_tenant_model_and_secret(tenant, model, other_tenant, other_model):
    same = (tenant, model) == (other_tenant, other_model)
    assert (tenant_salt(tenant, model) == tenant_salt(other_tenant, other_model)) == same
    assert tenant_salt(tenant, model) != tenant_salt(tenant, model, secret=b"of the cluster")
