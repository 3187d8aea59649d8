"""`product` multiplies non-negative integers of any size exactly."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.cluster.timing import product


@given(st.integers(0, 2**80), st.integers(0, 2**80))
def test_product_is_exact_at_any_size(large, small):
    assert product(large, small) == large * small
