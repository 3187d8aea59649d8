"""What was measured of a live service, as models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.performance.transfer import LinkSpeed, PrefillSpeed


@given(st.floats(0, 0.1), st.floats(1e5, 1e11))
def test_two_transfers_tell_overhead_and_bandwidth(overhead_s, bytes_per_s):
    """Where the measured times are exact."""
    sizes = (4096, 4 << 20)
    few, many = ((size, overhead_s + size / bytes_per_s) for size in sizes)
    link = LinkSpeed.fit(few, many)
    if many[1] - few[1] > many[1] * 0.01:
        assert overhead_s * 0.999 <= link.overhead_s <= (overhead_s + sizes[0] / bytes_per_s) * 1.001
        assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)


@given(st.floats(0, 1), st.floats(1e-6, 1))
def test_noise_never_makes_nonsense(few_s, many_s):
    """A large transfer may happen to be the faster one."""
    link = LinkSpeed.fit((4096, few_s), (4 << 20, many_s))
    assert link.overhead_s >= 0
    assert link.bytes_per_s > 0


def test_a_link_as_the_path_of_a_hand_off():
    """Each layer but the last costs an overhead that a hand-off at once would not."""
    transfer = LinkSpeed(overhead_s=0.001, bytes_per_s=1e9).transfer(kv_bytes_per_token=8000, layers=5)
    assert (transfer.latency_s, transfer.sync_s) == (0.001, 0.004)
    prefill = PrefillSpeed(fixed_s=0.01, s_per_token=0.0001)
    assert prefill.seconds(100) == pytest.approx(0.02)
    # A layer but the last of n tokens takes 1.6 µs × n, and that is what layers save: 4 ms at 625 tokens.
    assert transfer.crossover_tokens(prefill.seconds) == pytest.approx(626, abs=1)
