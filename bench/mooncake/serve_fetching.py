"""Run `twofold serve` so that workers always fetch the longest cached prefix of a prompt.

    python bench/mooncake/serve_fetching.py FLAGS OF twofold serve

Without this script, a worker fetches a prefix from another host only with `--router conductor`, and only if
the fetch is faster than prefill.
"""

import sys
from collections.abc import Sequence

import msgspec

from twofold.cli.main import main
from twofold.request import BlockKey
from twofold.serving.controller.controller import Controller
from twofold.serving.controller.registry import WorkerRegistry
from twofold.serving.messages import Message, Prefill, Registered, StoreChanged, StoreFetch, ToController

LIMIT_S = 60.0


class Registrations:
    """The host of each known worker, and the blocks in the KV store of each host."""

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}  # by instance
        self._stores: dict[str, StoreChanged] = {}  # latest message by store
        self._blocks: dict[str, set[BlockKey]] = {}

    def registered(self, message: Registered) -> None:
        self._hosts[message.peer.memory.instance] = message.peer.host

    def changed(self, message: StoreChanged) -> None:
        before = self._stores.get(message.host)
        if before is None or before.epoch != message.epoch:
            self._blocks[message.host] = set()
        self._stores[message.host] = message
        self._blocks[message.host].difference_update(message.removed)
        self._blocks[message.host].update(message.stored)

    def fetch(self, instance: str, keys: Sequence[BlockKey]) -> StoreFetch | None:
        """Return a command to fetch the longest stored prefix of a prompt from another host's KV store.

        Return None if the KV store of the worker's own host has an equally long or longer prefix.
        """
        own = self._leading(self._hosts[instance], keys)
        best = max(self._stores.values(), key=lambda store: self._leading(store.host, keys), default=None)
        if best is None or best.address is None or self._leading(best.host, keys) <= own:
            return None
        blocks = self._leading(best.host, keys)
        return StoreFetch(host=best.host, address=best.address, blocks=blocks, limit_s=LIMIT_S)

    def _leading(self, host: str, keys: Sequence[BlockKey]) -> int:
        blocks = self._blocks.get(host, set())
        return next((index for index, key in enumerate(keys) if key not in blocks), len(keys))


def listen(told: Registrations) -> None:
    """Patch the controller so that every prefill fetches its prefix from a KV store."""
    register, handle, send = WorkerRegistry.register, Controller.handle, WorkerRegistry.send

    def registering(self: WorkerRegistry, message: Registered, now: float) -> bool:
        told.registered(message)
        return register(self, message, now)

    def handling(self: Controller, message: ToController) -> None:
        if isinstance(message, StoreChanged):
            told.changed(message)
        handle(self, message)

    def sending(self: WorkerRegistry, instance: str, message: Message) -> None:
        if isinstance(message, Prefill):
            keys = message.generation.request.prefix_blocks
            message = msgspec.structs.replace(message, fetch=told.fetch(instance, keys))
        send(self, instance, message)

    WorkerRegistry.register = registering  # type: ignore[method-assign]
    Controller.handle = handling  # type: ignore[method-assign]
    WorkerRegistry.send = sending  # type: ignore[method-assign]


if __name__ == "__main__":
    listen(Registrations())
    sys.argv.insert(1, "serve")
    main()
