"""Fits of iteration times to measured profiles."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.coefficients import DecodeCoefficients, PrefillCoefficients, packaged
from twofold.performance.fitting.fit import FitOptions, decode_ms, fit_profile, non_negative_least_squares, prefill_ms
from twofold.performance.fitting.profile import ProfileRow, group_batches, read_profile

OPTIONS = FitOptions(source="made", date="2025-01-01")
SHAPES = [(2**power, 1) for power in range(7, 14)] + [(512, 2**power) for power in range(1, 7)]


def made_rows(prefill, decode):
    """Yield a profile row for each prompt size and batch size, with the times that the given coefficients predict."""
    for prompt, batch in SHAPES:
        blank = ProfileRow(
            model="m",
            hardware="h",
            tensor_parallel=2,
            prompt_size=prompt,
            batch_size=batch,
            token_size=128,
            prompt_time=1.0,
            token_time=1.0,
        )
        (one,) = group_batches([blank])
        yield msgspec.structs.replace(blank, prompt_time=prefill_ms(prefill, one), token_time=decode_ms(decode, one))


@settings(max_examples=20)
@given(
    st.floats(20, 100),
    st.floats(0.05, 0.4),
    st.floats(0.0, 0.1),
    st.floats(1e-6, 1e-5),
    st.floats(20, 60),
    st.floats(0.1, 1.0),
)
def test_recovers_the_coefficients_of_a_noiseless_profile(floor, slope, extra, square, base, sequence):
    prefill = PrefillCoefficients(floor_ms=floor, token_ms=slope, long_token_ms=extra, square_ms=square)
    decode = DecodeCoefficients(base_ms=base, sequence_ms=sequence, large_batch_ms=0.2, context_ms=3e-4)
    (fit,) = fit_profile(list(made_rows(prefill, decode)), OPTIONS)
    assert fit.prefill.floor_ms == pytest.approx(floor, rel=2e-3)
    assert fit.prefill.token_ms == pytest.approx(slope, rel=2e-3)
    assert fit.prefill.square_ms == pytest.approx(square, rel=2e-2)
    assert fit.decode.base_ms == pytest.approx(base, rel=1e-4)
    assert fit.decode.context_ms == pytest.approx(3e-4, rel=1e-2)
    assert fit.prefill_error < 0.02
    assert fit.decode_error < 0.05  # one fold leaves out the only batch beyond 32


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=3))
def test_least_squares_are_non_negative_and_optimal(true):
    columns = [np.ones(8), np.arange(1.0, 9.0), np.arange(1.0, 9.0) ** 2]
    target = sum(x * column for x, column in zip(true, columns, strict=True)) + np.sin(np.arange(8))
    found = non_negative_least_squares(columns, target, np.ones(8))
    misfit = float(np.sum((np.column_stack(columns) @ found - target) ** 2))
    assert (found >= 0).all()
    for nudge in np.eye(3) * 1e-3:
        for other in (found + nudge, np.maximum(found - nudge, 0)):
            assert misfit <= float(np.sum((np.column_stack(columns) @ other - target) ** 2)) + 1e-6


def test_rejects_too_few_batch_sizes():
    prefill = PrefillCoefficients(floor_ms=50, token_ms=0.1, long_token_ms=0, square_ms=0)
    decode = DecodeCoefficients(base_ms=40, sequence_ms=0.2, large_batch_ms=0, context_ms=0)
    with pytest.raises(ConfigurationError, match=r"2 consistent batch sizes .* m on h TP2: measure at least 3"):
        fit_profile(list(made_rows(prefill, decode))[:2], OPTIONS)
    with pytest.raises(ConfigurationError, match="no rows"):
        fit_profile([], OPTIONS)


def test_few_configurations_have_no_held_out_error():
    prefill = PrefillCoefficients(floor_ms=50, token_ms=0.1, long_token_ms=0, square_ms=0)
    decode = DecodeCoefficients(base_ms=40, sequence_ms=0.2, large_batch_ms=0, context_ms=0)
    (fit,) = fit_profile(list(made_rows(prefill, decode))[:4], OPTIONS)
    assert (fit.prefill_error, fit.decode_error) == (None, None)


def test_reproduces_the_packaged_coefficients(profile_path):
    again = {fit.pair: fit for fit in fit_profile(read_profile(profile_path), OPTIONS)}
    assert len(packaged()) == len(again) == 12
    for kept in packaged():
        new = again[kept.pair]
        assert (kept.prefill_error, kept.decode_error) == (new.prefill_error, new.decode_error)
        for part in ("prefill", "decode"):
            values = msgspec.structs.astuple(getattr(kept, part))
            assert values == pytest.approx(msgspec.structs.astuple(getattr(new, part)), rel=1e-4)


@pytest.mark.parametrize(
    ("pair", "prefill", "decode"),
    [
        ("bloom-176b on a100-80gb TP8", 0.10, 0.03),
        ("bloom-176b on h100-80gb TP8", 0.03, 0.02),
        ("llama2-70b on a100-80gb TP8", 0.10, 0.035),
        ("llama2-70b on h100-80gb TP8", 0.05, 0.025),
        ("llama2-70b on h100-80gb TP4", 0.025, 0.025),
    ],
)
def test_held_out_errors_match_the_documentation(pair, prefill, decode):
    (fit,) = (fit for fit in packaged() if fit.pair == pair)
    assert fit.prefill_error <= prefill
    assert fit.decode_error <= decode
