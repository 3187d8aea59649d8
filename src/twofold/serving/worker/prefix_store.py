"""What a worker gets from the store of its host, and what it puts there: the beginnings of prompts.

    prompt comes ─▶ the store has more of it than the engine ─▶ its blocks are copied into free ones ─▶ it is queued
                └─▶ otherwise ─────────────────────────────────────────────────────────────────────▶ it is queued
    prompt is computed ─▶ its blocks are copied into the store

What was brought is in the engine's memory as if it had been computed there: the scheduler finds it when the prompt
starts. Whatever goes wrong with the store, the prompt is queued and computes what is not there.
"""

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from twofold.errors import OutOfBlocksError
from twofold.kvcache.accounts import Grant
from twofold.kvcache.shared import SharedBlocks
from twofold.request import BlockKey
from twofold.serving.store.client import Copier, StoreClient
from twofold.serving.worker.prefixes import Prefixes, Queue
from twofold.serving.worker.state import WorkerState

_OWNER = "the host's store"
_MOST_PUTS = 64  # prompts that wait to be put; others are not, because the store does not keep up


class PrefixStore(Prefixes):
    """Two threads of a worker: one brings blocks before their prompts are queued, one puts those that were computed."""

    def __init__(self, state: WorkerState, shared: SharedBlocks, client: StoreClient, copier: Copier) -> None:
        self._state, self._shared, self._client, self._copier = state, shared, client, copier
        self._wanted: SimpleQueue[tuple[str, Sequence[bytes], Queue]] = SimpleQueue()
        self._computed: SimpleQueue[Sequence[bytes]] = SimpleQueue()

    def start(self) -> None:
        for run, name in ((self._bring_all, "store-load"), (self._put_all, "store-put")):
            threading.Thread(target=run, name=name, daemon=True).start()

    # -- with the lock held -----------------------------------------------------------------------------------

    def bring(self, request_id: str, keys: Sequence[BlockKey], queue: Queue) -> None:
        if self._client.epoch is None or self._shared.match(keys) == len(keys):
            queue()
        else:
            self._wanted.put((request_id, _live(keys), queue))

    def computed(self, keys: Sequence[BlockKey]) -> None:
        if keys and self._client.epoch is not None and self._computed.qsize() < _MOST_PUTS:
            self._computed.put(_live(keys))

    # -- without it -------------------------------------------------------------------------------------------

    def _bring_all(self) -> None:
        while True:
            self._bring(*self._wanted.get())

    def _bring(self, request_id: str, keys: Sequence[bytes], queue: Queue) -> None:
        state = self._state
        with state.changed:
            here = self._shared.match(keys)
        found = self._client.lookup(keys[here:]).blocks if here < len(keys) else 0
        grant = self._load(keys[: here + found]) if found else None
        with state.changed:
            if grant is not None:
                self._shared.release(grant)
                state.scheduler.changed = True
            if request_id in state.sequences:
                queue()
            state.grant()
            state.changed.notify()

    def _load(self, keys: Sequence[bytes]) -> Grant | None:
        """Copy blocks to where they are found; what is returned keeps them there until it is released."""
        with self._state.changed:
            try:
                grant, here = self._shared.borrow(_OWNER, keys)
            except OutOfBlocksError:
                return None  # it would have to wait for them: it may as well be computed when it has them
            blocks = self._shared.blocks_of(grant)
        count = self._client.load(keys[here:], self._copier, blocks[here:])
        with self._state.changed:
            self._shared.publish(grant, keys[: here + count], here)
        return grant

    def _put_all(self) -> None:
        state, shared = self._state, self._shared
        while True:
            keys = self._computed.get()
            with state.changed:
                keys = keys[: shared.match(keys)]
                grant, _ = shared.borrow(_OWNER, keys)
                blocks = shared.blocks_of(grant)
            self._client.store(keys, self._copier, blocks)
            with state.changed:
                shared.release(grant)
                state.scheduler.changed = True
                state.grant()
                state.changed.notify()


def _live(keys: Sequence[BlockKey]) -> list[bytes]:
    return [key for key in keys if isinstance(key, bytes)]  # all of them, in a live service
