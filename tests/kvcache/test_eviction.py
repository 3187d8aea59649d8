"""Eviction policies, each compared with a full scan of the cached blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.kvcache.eviction import EVICTIONS, create_eviction

RANKS = {
    "lru": lambda block: (block["since"],),
    "lfu": lambda block: (block["uses"], block["since"]),
    "length-aware": lambda block: (block["uses"], -block["position"], block["since"]),
}


class Plain:
    """Reference eviction policy, which ranks all blocks at each eviction."""

    def __init__(self, name):
        self.rank, self.blocks, self.now = RANKS[name], {}, 0

    def apply(self, action, key, position):
        self.now += 1
        if action == "stored":
            self.blocks[key] = {"uses": 1, "position": position, "since": self.now, "held": False}
        elif action == "forget":
            del self.blocks[key]
        else:
            block = self.blocks[key]
            block["uses"] += action == "hit"
            block["held"] = action == "hold" or (block["held"] and action == "hit")
            if action != "hold":
                block["since"] = self.now

    def may(self, action, key):
        block = self.blocks.get(key)
        if action == "stored" or block is None:
            return action == "stored" and block is None
        return action in ("hit", "forget") or block["held"] == (action == "release")

    def first(self, keep):
        free = [key for key, block in self.blocks.items() if not block["held"] and key not in keep]
        return min(free, key=lambda key: self.rank(self.blocks[key]), default=None)


actions = st.sampled_from(["stored", "stored", "hit", "hit", "hold", "release", "forget"])
steps = st.lists(st.tuples(actions, st.integers(0, 7), st.integers(0, 3)), max_size=120)


@pytest.mark.parametrize("name", EVICTIONS)
@settings(max_examples=300)
@given(steps, st.sets(st.integers(0, 7)))
def test_evicts_the_block_with_the_lowest_rank(name, steps, keep):
    rule, plain = create_eviction(name), Plain(name)
    for action, key, position in steps:
        if not plain.may(action, key):
            continue
        plain.apply(action, key, position)
        if action == "stored":
            rule.stored(key, position)
        else:
            getattr(rule, action)(key)
        assert rule.first(keep) == plain.first(keep)
        assert rule.first() == plain.first(())


@pytest.mark.parametrize("name", EVICTIONS)
def test_repeated_hits_do_not_grow_the_heap(name):
    rule = create_eviction(name)
    for key in range(4):
        rule.stored(key, key)
    for _ in range(1000):
        rule.hit(0)
    ranking = getattr(rule, "_ranking", None)
    assert ranking is None or len(ranking._heap) < 40
    assert rule.first() != 0


def test_rejects_an_unknown_policy():
    with pytest.raises(
        ConfigurationError, match="unknown eviction policy 'fifo': choose one of lru, lfu, length-aware"
    ):
        create_eviction("fifo")
