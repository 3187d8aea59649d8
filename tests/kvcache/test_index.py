"""Tests of the index of cached prefixes, against a simple reference implementation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support import caches
from twofold.kvcache.index import PrefixIndex

NAMES = ("a", "b", "c", "d")
prompts = caches.prompts(alphabet=2, longest=6)
steps = st.lists(
    st.tuples(st.sampled_from(["stored", "stored", "stored", "removed", "lost"]), st.sampled_from(NAMES), prompts),
    max_size=80,
)


def leading(blocks, keys):
    return next((index for index, key in enumerate(keys) if key not in blocks), len(keys))


@settings(max_examples=400)
@given(steps, st.lists(prompts, min_size=1, max_size=5))
def test_finds_the_longest_prefixes_and_their_instances(steps, asked):
    index, there = PrefixIndex(), {name: set() for name in NAMES}
    for action, name, keys in steps:
        if action == "stored":
            index.stored(name, keys)
            there[name].update(keys)
        elif action == "removed":
            index.removed(name, keys[1:])
            there[name].difference_update(keys[1:])
        else:
            index.lost(name)
            there[name].clear()
    for keys in asked:
        prefixes = {name: leading(blocks, keys) for name, blocks in there.items()}
        assert index.prefixes(keys) == {name: length for name, length in prefixes.items() if length}
        assert {name: index.prefix(name, keys) for name in NAMES} == prefixes


def test_the_index_does_not_grow_with_lost_instances():
    index = PrefixIndex()
    index.stored("stays", (1, 2))
    for life in range(1000):
        index.stored("dies", (1, 100 + life))
        index.lost("dies")
        index.lost("dies")
    assert index.prefixes((1, 2)) == {"stays": 2}
    assert len(index) < 2 + 20
    assert max(having.bit_length() for having in index._holders.values()) < 40
