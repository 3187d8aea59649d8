"""The overload ledger, which predicts prefill and decode load from the placed requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ledgers import decoding, ledger, placed
from support.toy import ToyModel


def test_prefill_load_is_the_predicted_ttft_over_its_bound():
    made = ledger("p0", "d0", ttft_s=0.5)
    made.placed(placed("a"), 0.0)
    assert made.prefill_load(placed("x", arrival_s=-0.05), 0.0) == pytest.approx((0.05 + 0.1 + 0.1) / 0.5)


def test_prefill_load_protects_admitted_requests():
    made = ledger("p0", "d0", ttft_s=0.5, budget=1000)
    made.placed(placed("a", prompt=500), 0.0)
    made.placed(placed("b", prompt=100, arrival_s=0.1), 0.1)
    late = placed("x", prompt=350, arrival_s=0.4)
    assert made.ttft(late, 0.4) >= 0.1 + 0.45
    assert made.prefill_load(late, 0.4) - made.ttft(late, 0.4) / 0.5 == pytest.approx(0.3 / 0.5)


def test_loads_include_the_prediction_margin():
    """If first tokens arrive later than predicted, the predicted prefill load rises."""
    made, now = ledger("p0", "d0", ttft_s=1.0), 0.0
    for number in range(20):
        made.placed(placed(str(number), output=1, arrival_s=now), now)
        expected_s = made.ttft(placed("x", arrival_s=now), now) - 0.1
        now += 2 * expected_s
        made.first_token(str(number), now)
        made.aborted(str(number), now)
    slow = made.ttft(placed("x", arrival_s=now), now)
    assert made.prefill_load(placed("x", arrival_s=now), now) > 1.5 * slow


def test_slow_decode_iterations_raise_the_decode_load():
    """If iterations take twice as long as the model predicts, the decode load doubles."""
    made = ledger("p0", "d0")
    decoding(made, "a", "b")
    for _ in range(100):
        made.observe_iteration("d0", 2, 0.04)
    assert made.decode_load(placed("x")) == pytest.approx(0.6, rel=0.01)


def test_decode_load_is_the_time_between_tokens_over_its_bound():
    made = ledger("p0", "d0")
    decoding(made, "a", "b")
    assert made.decode_load(placed("x")) == pytest.approx(0.3)
    assert made.decode_load(placed("x", output=1)) == 0.0


def test_sequences_beyond_the_limits_take_turns():
    seats = ledger("p0", "d0", max_num_seqs=2)
    decoding(seats, "a", "b", "c")
    assert seats.decode_load(placed("x")) == pytest.approx(2 * 0.2)
    memory = ledger("p0", "d0", capacity=200)
    decoding(memory, "a", "b", "c")
    assert memory.decode_load(placed("x")) == pytest.approx(2 * 0.4)


def test_coming_decode_load_counts_requests_in_prefill():
    """With `coming=True`, the decode load also counts requests in prefill."""
    made = ledger("p0", "p1", "d0", "d1")
    decoding(made, "there")
    for name, prefill, decode in (("a", "p0", "d0"), ("b", "p0", "d1"), ("c", "p1", "d0"), ("gone", "p1", "d0")):
        made.placed(placed(name, prefill=prefill, decode=decode), 0.0)
    made.placed(placed("short", output=1), 0.0)
    made.aborted("gone", 0.0)
    assert made.decode_load(placed("x")) == pytest.approx(0.2)
    assert made.decode_load(placed("x"), coming=True) == pytest.approx(0.4)
    assert made.decode_load(placed("x", output=1), coming=True) == 0.0


def test_decode_load_includes_half_the_mean_output():
    model = ToyModel(base=0, per_sequence=0, per_token=10)
    made = ledger("p0", "d0", model=model)
    decoding(made, "known")
    made.finished("known", 100, 1.0)
    decoding(made, "a")
    assert made.decode_load(placed("x")) == pytest.approx(2 * (100 + 50) * 10e-6 / 0.1)


def test_decode_relief_is_when_enough_requests_have_ended():
    """Decode relief is the time until the decode load drops to a limit."""
    made = ledger("p0", "d0")
    decoding(made, "known", now=0.0)
    made.finished("known", 9, 1.0)
    decoding(made, "a", now=1.0)
    decoding(made, "b", now=1.2)
    assert made.decode_relief_s(placed("x"), 0.2, 1.5) == pytest.approx(0.5)
    assert made.decode_relief_s(placed("x"), 0.1, 1.5) == pytest.approx(0.7)
    made.placed(placed("c"), 1.5)
    assert made.decode_relief_s(placed("x"), 0.1, 1.5) == pytest.approx(1.1)


def test_a_request_removed_after_prefill_leaves_no_load():
    made = ledger("p0", "d0")
    made.placed(placed("a"), 0.0)
    made.first_token("a", 0.1)
    made.aborted("a", 0.1)
    assert made.loads(0.1) == (0.0, 0.0)
    assert made.decode_relief_s(placed("x"), 0.1, 9.0) == 0.0
    made.first_token("a", 0.2)  # ignored


names = st.sampled_from("abcdef")
steps = st.lists(st.tuples(names, st.sampled_from(["placed", "prefilled", "decodes", "ended"])), max_size=60)


@given(steps)
def test_loads_are_zero_when_all_requests_ended(steps):
    made, there, computed, now = ledger("p0", "d0"), {}, set(), 0.0
    for name, what in steps:
        now += 0.01
        if what == "placed" and name not in there:
            there[name] = placed(name)
            made.placed(there[name], now)
        elif what == "prefilled" and name in there and name not in computed:
            made.first_token(name, now)
            made.start_decode(there[name], now)
            computed.add(name)
        elif what == "ended":
            made.finished(name, 3, now)
            there.pop(name, None)
            computed.discard(name)
        prefill, decode = made.loads(now)
        assert (prefill > 0.0) == bool(there.keys() - computed) or prefill == 0.0
        assert decode > 0.0 if computed else decode == 0.0
    for name in there:
        made.aborted(name, now)
    assert made.loads(now) == (0.0, 0.0)
