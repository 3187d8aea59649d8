"""What the stores of the hosts have, as the controller knows it."""

from collections.abc import Sequence

from twofold.kvcache.index import PrefixIndex
from twofold.request import BlockKey
from twofold.serving.messages import StoreChanged


class HostStores:
    """The blocks of each host's store, in whichever of its lives: another life begins with what it says that it has."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._epochs: dict[str, int] = {}
        self._addresses: dict[str, str | None] = {}

    def changed(self, message: StoreChanged) -> None:
        """Blocks have come and gone."""
        if self._epochs.get(message.host) != message.epoch:
            self._epochs[message.host] = message.epoch
            self._addresses[message.host] = message.address
            self._index.lost(message.host)
        self._index.removed(message.host, message.removed)
        self._index.stored(message.host, message.stored)

    def prefixes(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """How many leading blocks of a prompt the store of each host has that has any."""
        return self._index.prefixes(keys)

    def address(self, host: str) -> str | None:
        """Where the store of a host gives blocks to those of others; None where there is none, or it does not."""
        return self._addresses.get(host)
