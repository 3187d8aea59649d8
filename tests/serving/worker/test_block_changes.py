"""What a worker tells of its blocks."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.kvcache.cache import RemovalReason
from twofold.serving.worker.state import CacheChanges


@given(st.lists(st.integers(0, 5)), st.sets(st.integers(0, 60)))
def test_who_is_told_now_and_then_knows_what_is_there(toggled, looks):
    """Whatever comes and goes between two reports, their sum is what is there, and no report says anything twice."""
    changes, there, known = CacheChanges(), set(), set()
    for step, key in enumerate([*toggled, 0]):
        if key in there:
            there.remove(key)
            changes.removed(key, RemovalReason.CAPACITY)
        else:
            there.add(key)
            changes.stored(key)
        if step in looks or step == len(toggled):
            stored, removed = changes.take()
            assert not set(stored) & known
            assert set(removed) <= known
            known = (known | set(stored)) - set(removed)
            assert known == there
