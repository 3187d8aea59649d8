"""Hit rate and savings of a cache tier as functions of its capacity, and the capacity with the highest net savings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.planning.capacity.curve import NEVER, CapacityCurve, CapacityTerms


def terms(**more):
    given_terms = {
        "caches": 1,
        "nodes": 4,
        "blocks": 10,
        "block_gb": 0.5,
        "duration_s": 100.0,
        "accelerators": 8,
        "second_price": 0.01,
        "gb_price": 0.002,
    }
    return CapacityTerms(**(given_terms | more))


def curve(least, saved, **more):
    return CapacityCurve(terms(**more), np.array(least, dtype=np.int64), np.array(saved, dtype=np.float64))


LEAST = [2, 2, 8, NEVER, 16]
SAVED = [1.0, 2.0, 4.0, 100.0, 0.5]


def test_capacity_is_rounded_down_to_blocks():
    found = curve(LEAST, SAVED)
    assert found.full_gb_per_node == 16 * 0.5 / 4
    assert [found.at(gb).hit_rate for gb in (0.0, 0.2, 0.25, 0.99, 1.0, 2.0, 50.0)] == [
        0.0, 0.0, 0.2, 0.2, 0.3, 0.4, 0.4,
    ]  # fmt: skip
    point = found.at(1.0)
    assert point.accelerators == pytest.approx(7 / 100 * 8)
    assert point.saved_per_h == pytest.approx(7 / 100 * 0.01 * 3600)
    assert point.price_per_h == pytest.approx(4 * 0.002)
    assert point.gain_per_h == point.saved_per_h - point.price_per_h


def test_local_caches_need_capacity_on_every_node():
    pool, local = curve(LEAST, SAVED), curve(LEAST, SAVED, caches=4)
    assert local.full_gb_per_node == 4 * pool.full_gb_per_node
    assert local.at(1.0).hit_rate == pool.at(0.25).hit_rate


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 5)), min_size=1, max_size=30), st.floats(0, 0.1))
def test_best_has_the_highest_net_savings(found, price):
    least, saved = zip(*found, strict=True)
    made = curve(least, saved, gb_price=price)
    best = made.best().gain_per_h
    assert all(made.at(blocks / 8).gain_per_h <= best + 1e-9 for blocks in range(60))


def test_best_is_full_when_free_and_zero_when_expensive():
    assert curve(LEAST, SAVED, gb_price=0.0).best().gb_per_node == 2.0
    assert curve(LEAST, SAVED, gb_price=1e6).best().gb_per_node == 0.0
    assert curve([NEVER], [0.0]).best().hit_rate == 0.0
