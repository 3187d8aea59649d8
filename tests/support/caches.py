"""What tests of prefix caches share: prompts with common prefixes, and a watcher that checks what it is told."""

from hypothesis import strategies as st

from twofold.kvcache.cache import CacheObserver
from twofold.kvcache.prefix import prefix_keys


def prompts(alphabet, longest):
    """Prompts as the keys of blocks of one token each; the fewer different tokens, the more they share."""
    tokens = st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=longest)
    return tokens.map(lambda drawn: tuple(prefix_keys(drawn, 1)))


class Seen(CacheObserver):
    """The keys that a watcher believes to be there, and the reasons it was told of removals."""

    def __init__(self):
        self.keys, self.reasons = set(), []

    def stored(self, key):
        assert key not in self.keys
        self.keys.add(key)

    def removed(self, key, reason):
        self.keys.remove(key)
        self.reasons.append(reason)
