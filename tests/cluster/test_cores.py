"""Division of CPU cores among workers and gateway."""

from twofold.cluster.cores import gateway_cores, share_cores
from twofold.instance import Role


def test_workers_share_cores_evenly_or_take_turns():
    """With more workers than cores, the first workers are the last to share theirs."""
    assert share_cores([0, 1, 2, 3], 2) == [(0, 1), (2, 3)]
    assert share_cores([0, 1, 2], 2) == [(0,), (1,)]
    assert share_cores([0, 1], 3) == [(0,), (1,), (1,)]
    assert share_cores([4, 6], 5) == [(4,), (6,), (6,), (4,), (4,)]


def test_gateway_avoids_the_cores_of_decode_workers():
    """It shares cores with prefill workers first, and uses all cores if every core decodes."""
    split = [(Role.PREFILL, (0,)), (Role.DECODE, (1,))]
    assert gateway_cores([0, 1], split) == (0,)
    assert gateway_cores([0, 1], [(Role.MIXED, (0,)), (Role.MIXED, (1,))]) == (0, 1)
    assert gateway_cores([0, 1], [(Role.PREFILL, ()), (Role.DECODE, ())]) == (0, 1)
