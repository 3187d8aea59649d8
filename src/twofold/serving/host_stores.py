"""What the stores of the hosts have, as the controller knows it."""

from twofold.kvcache.index import PrefixIndex
from twofold.serving.messages import StoreChanged


class HostStores:
    """The blocks of each host's store, in whichever of its lives: another life begins with what it says that it has.

    `index` has them by host.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._epochs: dict[str, int] = {}
        self._addresses: dict[str, str | None] = {}

    def changed(self, message: StoreChanged) -> None:
        """Blocks have come and gone."""
        if self._epochs.get(message.host) != message.epoch:
            self._epochs[message.host] = message.epoch
            self._addresses[message.host] = message.address
            self.index.lost(message.host)
        self.index.removed(message.host, message.removed)
        self.index.stored(message.host, message.stored)

    def lost(self, host: str) -> None:
        """A host is gone, or out of reach, and nobody gets what its store has. If it comes back, only what is said then
        is known."""
        self.index.lost(host)

    def address(self, host: str) -> str | None:
        """Where the store of a host gives blocks to those of others; None where there is none, or it does not."""
        return self._addresses.get(host)
