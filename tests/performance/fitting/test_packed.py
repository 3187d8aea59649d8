"""Predicted times of packed iterations, and their fit to measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.fitting.packed import MeasuredIteration, fit_packed, median_iterations
from twofold.performance.host_profile import PackedModel, PackedTimes, spread

TRUE = PackedTimes(
    base_s=0.012,
    token_s=(0.002, 0.006, 0.001, 0.0003, 0.0004, 0.0005, 0.00045),
    square_s=1e-7,
    sequence_s=0.0002,
    context_s=1.5e-6,
)
COUNTS = st.integers(0, 4096)


def iteration(tokens, squares, sequences, context, slower=1.0):
    seconds = TRUE.seconds(tokens, squares, sequences, context) * slower
    return MeasuredIteration(tokens=tokens, squares=squares, sequences=sequences, context=context, seconds=seconds)


def measured():
    """Yield prefills, decodes and mixed iterations, each measured three times, once as an outlier."""
    prompts = [(size, size * size, 0, 0) for size in (16, 48, 128, 320, 640, 1024, 2000)]
    packed = [(size, size * 64, 0, 0) for size in (192, 512, 1600)]
    decodes = [(0, 0, batch, batch * context) for batch in (1, 2, 4, 8, 16, 32, 64) for context in (32, 256, 1024)]
    mixed = [(size, size * size, batch, batch * 200) for size in (16, 128, 400) for batch in (2, 8)]
    for one in (*prompts, *packed, *decodes, *mixed):
        yield from (iteration(*one, slower=slower) for slower in (1.0, 1.0, 2.5))


@given(COUNTS, COUNTS, COUNTS)
def test_times_grow_with_tokens_decodes_and_context(tokens, sequences, more):
    before = TRUE.seconds(tokens, tokens * tokens, sequences, sequences * 10)
    assert TRUE.seconds(tokens + more, (tokens + more) ** 2, sequences, sequences * 10) >= before
    assert TRUE.seconds(tokens, tokens * tokens, sequences + more, (sequences + more) * 10) >= before


@given(COUNTS)
def test_spread_adds_up_to_the_tokens(tokens):
    assert sum(spread(tokens)) == tokens


@given(COUNTS, COUNTS, st.integers(1, 64), COUNTS)
def test_the_model_follows_the_formula(tokens, squares, sequences, context):
    model = PackedModel("it", TRUE)
    assert model.prefill_s(tokens, squares) == TRUE.seconds(tokens, squares, 0, 0)
    assert model.mixed_s(tokens, squares, sequences, context) == TRUE.seconds(tokens, squares, sequences, context)
    cost = model.decode_cost(sequences)
    assert cost.base_s + cost.context_s * context == pytest.approx(TRUE.seconds(0, 0, sequences, context))


def test_recovers_the_coefficients_despite_outliers():
    found = fit_packed(measured())
    assert found.base_s == pytest.approx(TRUE.base_s, rel=0.02)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=0.05)
    assert found.context_s == pytest.approx(TRUE.context_s, rel=0.02)
    assert max(found.prefill_error, found.decode_error, found.mixed_error) < 0.05
    assert found.iterations == len(median_iterations(measured()))


def test_kinds_without_measurements_have_no_error():
    found = fit_packed(one for one in measured() if one.kind != "mixed")
    assert found.mixed_error is None
    assert found.decode_error is not None


def test_rejects_too_few_distinct_iterations():
    with pytest.raises(ConfigurationError, match="a fit needs 11 distinct"):
        fit_packed([iteration(16, 256, 0, 0)] * 100)
