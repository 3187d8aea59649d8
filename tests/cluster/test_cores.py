"""Which cores workers and gateway get."""

from twofold.cluster.cores import gateway_cores, share_cores
from twofold.instance import Role


def test_workers_share_cores_evenly_or_take_turns():
    """Four cores for two workers are two each; with more workers than cores the first ones get company last."""
    assert share_cores([0, 1, 2, 3], 2) == [(0, 1), (2, 3)]
    assert share_cores([0, 1, 2], 2) == [(0,), (1,)]
    assert share_cores([0, 1], 3) == [(0,), (1,), (1,)]
    assert share_cores([4, 6], 5) == [(4,), (6,), (6,), (4,), (4,)]


def test_the_gateway_keeps_off_the_cores_of_decode_workers():
    """It shares with prefill where it must share; where every core decodes, it runs anywhere."""
    split = [(Role.PREFILL, (0,)), (Role.DECODE, (1,))]
    assert gateway_cores([0, 1], split) == (0,)
    assert gateway_cores([0, 1], [(Role.MIXED, (0,)), (Role.MIXED, (1,))]) == (0, 1)
    assert gateway_cores([0, 1], [(Role.PREFILL, ()), (Role.DECODE, ())]) == (0, 1)
