"""The prefix hash chain."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.kvcache.prefix import prefix_keys, tenant_salt

tokens = st.lists(st.integers(0, 200_000), max_size=60)


@given(tokens, tokens, st.integers(1, 8))
def test_keys_agree_exactly_as_far_as_the_prefixes_do(left, right, size):
    """Two prompts share key i if, and only if, they share all tokens up to the end of block i."""
    pairs = zip(prefix_keys(left, size), prefix_keys(right, size), strict=False)
    for i, (key_left, key_right) in enumerate(pairs):
        end = (i + 1) * size
        assert (key_left == key_right) == (left[:end] == right[:end])


@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_keys_and_salts_separate_tenants(ids, size):
    """A partly filled block cannot be shared; nor can a block of another tenant."""
    keys = list(prefix_keys(ids, size))
    assert len(keys) == len(ids) // size
    assert not set(keys) & set(prefix_keys(ids, size, salt=b"tenant"))


@given(st.text(), st.text(), st.text(), st.text())
def test_only_the_same_tenant_with_the_same_model_has_the_same_salt(tenant, model, other_tenant, other_model):
    """Names that run together the same way are different names."""
    same = (tenant, model) == (other_tenant, other_model)
    assert (tenant_salt(tenant, model) == tenant_salt(other_tenant, other_model)) == same
    assert tenant_salt(tenant, model) != tenant_salt(tenant, model, secret=b"of the cluster")
