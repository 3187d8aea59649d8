"""Change-point detection in a series of values."""

import random
from math import sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.replan.change_point import FEWEST, WINDOWS, ChangePoint


def told(numbers):
    changes = ChangePoint()
    for number in numbers:
        changes.add(number)
    return changes


def normal(mean, count, seed=0):
    draw = random.Random(seed)
    return [draw.gauss(mean, 1.0) for _ in range(count)]


def test_no_change_before_a_window_and_eight_numbers():
    assert told(normal(0.0, WINDOWS[0] + FEWEST - 1)).strongest() is None
    assert told(normal(0.0, WINDOWS[0] + FEWEST)).strongest().numbers == WINDOWS[0]


def test_locates_a_step():
    change = told([*normal(0.0, 50), *normal(9.0, 21, seed=1)]).located()
    assert change.numbers == 21
    assert change.before == pytest.approx(0.0, abs=0.5)
    assert change.after == pytest.approx(9.0, abs=0.8)
    assert change.chance < 1e-12


def test_statistic_is_the_t_test():
    numbers = [*normal(0.0, 8), *normal(1.0, 4, seed=1)]
    before, after = numbers[:8], numbers[8:]
    within = sum((x - fmean(before)) ** 2 for x in before) + sum((x - fmean(after)) ** 2 for x in after)
    t = abs(fmean(after) - fmean(before)) / sqrt(within / 10 * (1 / 8 + 1 / 4))
    sigmas = told(numbers).strongest().sigmas
    assert 0.7 * t < sigmas < t


def test_sigmas_match_student_t():
    for freedom, t in ((10, 4.587), (30, 3.646)):
        count = freedom + 2
        # Half a step up and down spread by 1; the level of the last four then decides t.
        noise = [(-1.0) ** i for i in range(count)]
        scale = sqrt(sum(x * x for x in noise) / freedom)
        step = t * scale * sqrt(1 / (count - 4) + 1 / 4)
        change = told([*noise[:-4], *(x + step for x in noise[-4:])])._compare(4)
        assert change.chance == pytest.approx(0.001, rel=0.03)


def test_handles_constant_sequences():
    assert told([5.0] * 40).strongest().sigmas == 0.0
    assert told([5.0] * 40 + [6.0] * 4).strongest().chance < 1e-12


def test_restart_forgets_older_numbers():
    changes = told([*normal(0.0, 50), *normal(9.0, 20, seed=1)])
    changes.restart(20)
    assert changes._count == 20
    assert changes.located().chance > 1e-3
    fresh = told(normal(9.0, 20, seed=1))
    for number in normal(12.0, 10, seed=2):
        changes.add(number)
        fresh.add(number)
    assert changes.located() == pytest.approx(fresh.located())


@given(st.lists(st.floats(-1e3, 1e3), min_size=0, max_size=60), st.floats(-1e6, 1e6))
def test_result_is_independent_of_the_offset(numbers, level):
    plain, lifted = told(numbers).strongest(), told([number + level for number in numbers]).strongest()
    if plain is None:
        assert lifted is None
    elif plain.sigmas < 30:  # otherwise the spread may be rounding error
        assert lifted.sigmas == pytest.approx(plain.sigmas, rel=1e-2, abs=1e-2)


def test_memory_is_bounded():
    assert len(told(normal(0.0, 1000))._sums) == WINDOWS[-1] + 1
