"""Piecewise linear curves equal the textbook, inside and beyond their points."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.splitwise_published import PiecewiseLinear

XS = [128, 256, 512, 4096]
YS = [0.08, 0.1, 0.17, 1.3]


@given(st.floats(128, 4096))
def test_inside_it_is_linear_interpolation(x):
    """To the last digits, against numpy's."""
    assert PiecewiseLinear(XS, YS)(x) == pytest.approx(float(np.interp(x, XS, YS)), rel=1e-12)


@given(st.floats(0, 128), st.floats(4096, 1e6))
def test_beyond_both_ends_the_outer_lines_go_on(low, high):
    """The line through the two points nearest to that end."""
    curve = PiecewiseLinear(XS, YS)
    assert curve(low) == pytest.approx(0.08 + (0.1 - 0.08) / 128 * (low - 128), rel=1e-12)
    assert curve(high) == pytest.approx(1.3 + (1.3 - 0.17) / (4096 - 512) * (high - 4096), rel=1e-12)


@pytest.mark.parametrize(("xs", "ys"), [([1], [1]), ([1, 2], [1]), ([2, 1], [1, 2]), ([1, 1], [1, 2])])
def test_points_that_are_no_curve_are_refused(xs, ys):
    """One point, unequal lists, falling or equal x."""
    with pytest.raises(ConfigurationError):
        PiecewiseLinear(xs, ys)
