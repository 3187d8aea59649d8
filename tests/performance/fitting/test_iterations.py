"""Fits of iteration times to measurements."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.fitting.iterations import IterationWork, Measurement, fit_iterations, median_measurements
from twofold.performance.profile import IterationTimes, MeasuredModel, spread

TRUE = IterationTimes(
    base_s=0.012,
    bends=(0, 4, 128, 2048),
    token_s=(0.004, 0.0006, 0.0003, 0.0005),
    square_s=1e-7,
    sequence_s=0.0002,
    context_s=1.5e-6,
    prompt_s=0.004,
    mixed_s=0.003,
    large=32,
    large_s=0.0004,
)
COUNTS = st.integers(0, 4096)
PROMPTS = [(size, size * size, 0, 0) for size in (2, 5, 16, 48, 128, 320, 640, 1024, 2000, 4000, 8000)]
DECODES = [(0, 0, batch, batch * context) for batch in (1, 2, 4, 9, 16, 32, 48, 64) for context in (32, 256, 1024)]
MIXED = [(size, size * size, batch, batch * 200) for size in (16, 128, 400, 1600) for batch in (2, 8, 40)]


def measurement(*work, slower=1.0, requests=0, request_s=0.0, times=TRUE):
    seconds = sum(times.seconds(*each) for each in work) * slower + requests * request_s
    return Measurement(work=tuple(IterationWork(*each) for each in work), seconds=seconds, requests=requests)


def measured(**how):
    """Yield three measurements of each iteration, one of them 2.5 times too slow."""
    for one in (*PROMPTS, *DECODES, *MIXED):
        yield from (measurement(one, slower=slower, **how) for slower in (1.0, 1.0, 2.5))


@given(COUNTS, COUNTS, COUNTS)
def test_times_grow_with_tokens_decodes_and_context(tokens, sequences, more):
    before = TRUE.seconds(tokens, tokens * tokens, sequences, sequences * 10)
    assert TRUE.seconds(tokens + more, (tokens + more) ** 2, sequences, sequences * 10) >= before
    assert TRUE.seconds(tokens, tokens * tokens, sequences + more, (sequences + more) * 10) >= before


@given(COUNTS, st.lists(st.integers(1, 4096), unique=True, max_size=6))
def test_spread_adds_up_to_the_tokens(tokens, bends):
    assert sum(spread(tokens, (0, *sorted(bends)))) == tokens


@given(st.integers(1, 4096), COUNTS, st.integers(1, 64), COUNTS)
def test_the_model_follows_the_formula(tokens, squares, sequences, context):
    model = MeasuredModel("it", TRUE)
    assert model.prefill_s(tokens, squares) == TRUE.seconds(tokens, squares, 0, 0)
    assert model.mixed_s(tokens, squares, sequences, context) == TRUE.seconds(tokens, squares, sequences, context)
    cost = model.decode_cost(sequences)
    assert cost.base_s + cost.context_s * context == pytest.approx(TRUE.seconds(0, 0, sequences, context))


def test_finds_times_bends_and_knee_despite_outliers():
    found = fit_iterations(measured()).times
    for one in (*PROMPTS, *DECODES, *MIXED, (3000, 9_000_000, 0, 0), (0, 0, 24, 4800), (800, 640_000, 20, 9000)):
        assert found.seconds(*one) == pytest.approx(TRUE.seconds(*one), rel=0.03), one
    assert found.large == 32
    assert 2048 in found.bends
    assert max(found.prefill_error, found.decode_error, found.mixed_error) < 0.05
    assert found.iterations == len(median_measurements(measured()))
    assert (found.max_prompt_tokens, found.max_sequences) == (8000, 64)


def test_a_straight_line_gets_no_bends():
    straight = IterationTimes(
        base_s=0.01, bends=(0,), token_s=(0.0002,), square_s=0.0, sequence_s=0.001, context_s=1e-6
    )
    draw = random.Random(0)
    noisy = [measurement(one, times=straight, slower=draw.gauss(1.0, 0.01)) for one in (*PROMPTS, *DECODES, *MIXED)]
    assert fit_iterations(noisy).times.bends == (0,)


def test_separates_the_cost_of_requests_from_that_of_prompts():
    """The fit separates the HTTP overhead of a request from its prefill time."""
    plain = msgspec.structs.replace(TRUE, mixed_s=0.0)
    over_http = [measurement(one, requests=1, request_s=0.02, times=plain) for one in PROMPTS]
    inside = [measurement(one, times=plain) for one in (*DECODES, *MIXED)]
    times, request_s = fit_iterations([*over_http, *inside])
    assert request_s == pytest.approx(0.02, rel=0.1)
    assert times.seconds(640, 640 * 640, 0, 0) == pytest.approx(plain.seconds(640, 640 * 640, 0, 0), rel=0.05)


def test_fits_sums_of_iterations():
    """A measurement may span several iterations, such as the chunks of a prompt."""
    chunks = [[(512, 512 * (512 + 2 * 512 * k), 0, 0) for k in range(count)] for count in range(2, 9)]
    found = fit_iterations([*measured(), *(measurement(*each) for each in chunks)]).times
    assert sum(found.seconds(*each) for each in chunks[-1]) == pytest.approx(
        sum(TRUE.seconds(*each) for each in chunks[-1]), rel=0.03
    )


def test_kinds_without_measurements_have_no_error():
    found = fit_iterations(one for one in measured() if one.kind != "mixed").times
    assert found.mixed_error is None
    assert found.decode_error is not None


def test_rejects_too_few_distinct_measurements():
    with pytest.raises(ConfigurationError, match="a fit needs 11 distinct"):
        fit_iterations([measurement((16, 256, 0, 0))] * 100)


def test_an_iteration_takes_time():
    """Throughput divides by iteration times, and a fit may find that requests take all the time of prompts."""
    free = IterationTimes(base_s=0.0, bends=(0,), token_s=(0.0,), square_s=0.0, sequence_s=0.001, context_s=0.0)
    prompts = [measurement(one, requests=1, request_s=0.01, times=free) for one in PROMPTS]
    times = fit_iterations(prompts + [measurement(one, times=free) for one in DECODES]).times
    assert times.base_s == 1e-6
