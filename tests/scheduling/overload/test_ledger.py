"""The ledger: where requests are, and the loads that follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ledgers import decoding, ledger, newcomer
from support.toy import ToyModel


def test_prefill_load_is_the_wait_over_its_bound():
    """From the arrival on, so that what passed since counts."""
    made = ledger("p0", "d0", ttft_s=0.5)
    made.placed(newcomer("a"), 0.0)
    assert made.prefill_load(newcomer("x", arrival_s=-0.05), 0.0) == pytest.approx((0.05 + 0.1 + 0.1) / 0.5)


def test_nobody_who_was_taken_is_made_late_by_who_comes_later():
    """b waits for the iteration of a: with x it would end 0.85 s after b came, which is what the load says."""
    made = ledger("p0", "d0", ttft_s=0.5, budget=1000)
    made.placed(newcomer("a", prompt=500), 0.0)
    made.placed(newcomer("b", prompt=100, arrival_s=0.1), 0.1)
    late = newcomer("x", prompt=350, arrival_s=0.4)
    assert made.ttft(late, 0.4) >= 0.1 + 0.45
    assert made.prefill_load(late, 0.4) - made.ttft(late, 0.4) / 0.5 == pytest.approx(0.3 / 0.5)


def test_loads_leave_the_room_that_predictions_needed():
    """First tokens came after twice the time: the load of the next is twice as high."""
    made, now = ledger("p0", "d0", ttft_s=1.0), 0.0
    for number in range(20):
        made.placed(newcomer(str(number), decodes=False, arrival_s=now), now)
        expected_s = made.ttft(newcomer("x", arrival_s=now), now) - 0.1
        now += 2 * expected_s
        made.prefilled(str(number), now)
        made.ended(str(number), now)
    slow = made.ttft(newcomer("x", arrival_s=now), now)
    assert made.prefill_load(newcomer("x", arrival_s=now), now) > 1.5 * slow


def test_iterations_that_take_longer_count():
    """Decodes that are twice as slow as the model says are soon expected to be."""
    made = ledger("p0", "d0")
    decoding(made, "a", "b")
    for _ in range(100):
        made.stepped("d0", 2, 0.04)
    assert made.decode_load(newcomer("x"), 0.0) == pytest.approx(0.6, rel=0.01)


def test_decode_load_is_the_time_between_tokens_over_its_bound():
    """With the newcomer; one that ends with its first token brings none."""
    made = ledger("p0", "d0")
    decoding(made, "a", "b")
    assert made.decode_load(newcomer("x"), 0.0) == pytest.approx(0.3)
    assert made.decode_load(newcomer("x", decodes=False), 0.0) == 0.0


def test_what_does_not_fit_waits():
    """More sequences than an iteration takes, or more tokens than there is memory for, take turns."""
    seats = ledger("p0", "d0", max_num_seqs=2)
    decoding(seats, "a", "b", "c")
    assert seats.decode_load(newcomer("x"), 0.0) == pytest.approx(2 * 0.2)
    memory = ledger("p0", "d0", capacity=200)
    decoding(memory, "a", "b", "c")
    assert memory.decode_load(newcomer("x"), 0.0) == pytest.approx(2 * 0.4)


def test_the_coming_load_counts_those_who_were_taken_before():
    """On the same decode instance, wherever they are prefilled; who has ended, or will not decode, has no place."""
    made = ledger("p0", "p1", "d0", "d1")
    decoding(made, "there")
    for name, prefill, decode in (
        ("a", "p0", "d0"),
        ("b", "p0", "d1"),
        ("c", "p1", "d0"),
        ("gone", "p1", "d0"),
    ):
        made.placed(newcomer(name, prefill=prefill, decode=decode), 0.0)
    made.placed(newcomer("short", decodes=False), 0.0)
    made.ended("gone", 0.0)
    assert made.decode_load(newcomer("x"), 0.0) == pytest.approx(0.2)
    assert made.coming_decode_load(newcomer("x"), 0.0) == pytest.approx(0.4)
    assert made.coming_decode_load(newcomer("x", decodes=False), 0.0) == 0.0


def test_what_is_written_meanwhile_counts():
    """Half of what outputs have in the end, for each who decodes."""
    model = ToyModel(base=0, per_sequence=0, per_token=10)
    made = ledger("p0", "d0", model=model)
    decoding(made, "known")
    made.ended("known", 1.0, output_tokens=100)
    decoding(made, "a")
    assert made.decode_load(newcomer("x"), 0.0) == pytest.approx(2 * (100 + 50) * 10e-6 / 0.1)


def test_relief_is_when_enough_have_ended():
    """Those who came first first; those who are being prefilled come before them."""
    made = ledger("p0", "d0")
    decoding(made, "known", now=0.0)
    made.ended("known", 1.0, output_tokens=9)
    decoding(made, "a", now=1.0)
    decoding(made, "b", now=1.2)
    assert made.decode_relief_s(newcomer("x"), 0.2, 1.5) == pytest.approx(0.5)
    assert made.decode_relief_s(newcomer("x"), 0.1, 1.5) == pytest.approx(0.7)
    made.placed(newcomer("c"), 1.5)
    assert made.decode_relief_s(newcomer("x"), 0.1, 1.5) == pytest.approx(1.1)


def test_a_refused_prompt_leaves_nothing():
    """It ended before it decoded, so nothing is learned from it."""
    made = ledger("p0", "d0")
    made.placed(newcomer("a"), 0.0)
    made.prefilled("a", 0.1)
    made.ended("a", 0.1)
    assert made.loads(0.1) == (0.0, 0.0)
    assert made.decode_relief_s(newcomer("x"), 0.1, 9.0) == 0.0
    assert made.prefilled("a", 0.2) is None


names = st.sampled_from("abcdef")
steps = st.lists(st.tuples(names, st.sampled_from(["placed", "prefilled", "decodes", "ended"])), max_size=60)


@given(steps)
def test_whoever_comes_and_goes_nothing_is_left(steps):
    """Every order that can be: the loads are those of who is there, and none once all have ended."""
    made, there, computed, now = ledger("p0", "d0"), {}, set(), 0.0
    for name, what in steps:
        now += 0.01
        if what == "placed" and name not in there:
            there[name] = newcomer(name)
            made.placed(there[name], now)
        elif what == "prefilled" and name in there and name not in computed:
            assert made.prefilled(name, now) is there[name]
            made.decodes(there[name], now)
            computed.add(name)
        elif what == "ended":
            made.ended(name, now, output_tokens=3)
            there.pop(name, None)
            computed.discard(name)
        prefill, decode = made.loads(now)
        assert (prefill > 0.0) == bool(there.keys() - computed) or prefill == 0.0
        assert decode > 0.0 if computed else decode == 0.0
    for name in there:
        made.ended(name, now)
    assert made.loads(now) == (0.0, 0.0)
