"""What hand-offs between ranks cost."""

import pytest

from twofold.performance.transfer import LinkSpeed, reshard_path

LINK = LinkSpeed(overhead_s=0.001, bytes_per_s=1e6)


def test_one_rank_to_one_is_a_plain_path():
    """Each layer in one piece, from the one rank that has them all."""
    assert reshard_path(LINK, [100] * 4, [1] * 4) == LINK.transfer(400, 4)


def test_two_ranks_send_half_each():
    """Side by side: the same prompt is through in half the time."""
    whole, halves = reshard_path(LINK, [100] * 4, [1] * 4), reshard_path(LINK, [50] * 4, [1] * 4)
    assert halves.serialized_s(1000) - 0.001 == pytest.approx((whole.serialized_s(1000) - 0.001) / 2)


def test_every_piece_costs_its_own_overhead():
    """One rank that serves two of the target sends each layer in two transfers."""
    path = reshard_path(LINK, [100] * 4, [2] * 4)
    assert (path.latency_s, path.sync_s) == (0.002, 0.006)
    assert path.kv_bytes_per_token == 400, "as many bytes as in one piece"
