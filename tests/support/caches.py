"""A Hypothesis strategy for prompts with common prefixes, and an observer that records changes of a prefix cache."""

from hypothesis import strategies as st

from twofold.kvcache.cache import CacheObserver
from twofold.kvcache.prefix import prefix_keys


def prompts(alphabet, longest):
    """Return a Hypothesis strategy for prompts that often share prefixes. A prompt is a tuple of block keys."""
    tokens = st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=longest)
    return tokens.map(lambda drawn: tuple(prefix_keys(drawn, 1)))


class RecordingObserver(CacheObserver):
    """Cache observer that records the cached keys and the reasons for removals."""

    def __init__(self):
        self.keys, self.reasons = set(), []

    def stored(self, key):
        assert key not in self.keys
        self.keys.add(key)

    def removed(self, key, reason):
        self.keys.remove(key)
        self.reasons.append(reason)
