"""What the controller is to be told of the blocks of prompts that a worker has."""

from twofold.kvcache.watcher import CacheWatcher, Removal
from twofold.request import BlockKey


class BlockChanges(CacheWatcher):
    """Notes what has come and gone since it was told last; what did both meanwhile is as it was.

    Guarded by the lock that guards the memory that it watches.
    """

    def __init__(self) -> None:
        self._changes: dict[BlockKey, bool] = {}  # whether it is there now

    def stored(self, key: BlockKey) -> None:
        self._note(key, there=True)

    def removed(self, key: BlockKey, reason: Removal) -> None:  # noqa: ARG002  (it is gone, whatever the reason)
        self._note(key, there=False)

    def take(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """The blocks that have come, and those that are gone."""
        changes, self._changes = self._changes, {}
        stored = [key for key, there in changes.items() if there]
        return stored, [key for key, there in changes.items() if not there]

    def _note(self, key: BlockKey, *, there: bool) -> None:
        # A block comes and goes in turn, so a second change takes the first one back.
        if self._changes.pop(key, None) is None:
            self._changes[key] = there
