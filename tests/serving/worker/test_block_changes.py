"""A worker's reports of changes in its prefix cache."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.kvcache.cache import CacheChanges, RemovalReason


@given(st.lists(st.integers(0, 5)), st.sets(st.integers(0, 60)))
def test_reports_add_up_to_the_cache(toggled, looks):
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
