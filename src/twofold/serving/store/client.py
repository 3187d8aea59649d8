"""A worker's end of its host's store.

All of it is for speed only: whatever becomes of the store, what was asked of it ends, with fewer blocks or none, and
the caller computes the rest. Nothing here raises because of the store.
"""

import logging
import os
import select
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import zmq

from twofold.engine.base import OnLayer
from twofold.errors import ConfigurationError
from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.store.link import Link, Question
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import (
    Ask,
    Asked,
    Block,
    Commit,
    Fetch,
    Fetched,
    Found,
    Held,
    Hello,
    Leased,
    Load,
    Lookup,
    Put,
    Release,
    ToClient,
    Welcome,
)

log = logging.getLogger(__name__)

_HELLO_S = 0.2  # between two times that a store is asked whether it is there


class Copier(Protocol):
    """Copies one layer of blocks between an engine's memory and slots of a store's, pairwise."""

    @property
    def layers(self) -> int: ...

    def span(self, layer: int) -> slice:
        """The bytes of a slot that a layer takes; together, in turn, they are all of it."""
        ...

    def read(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """From slots into the engine's blocks."""
        ...

    def write(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """From the engine's blocks into slots."""
        ...


class Available(NamedTuple):
    """How many leading blocks of a prompt a store has, and how many of them, from the first on, in its memory."""

    blocks: int
    in_memory: int


class StoreClient:
    """Asks the store whose inbox is `store`, which may come, die and come again; it answers to `inbox`.

    With `verify` what is loaded is compared with the checksum that its writer computed; `damaged` counts what differs.
    A store that is silent for `patience_s` is not asked any more until it says something. All methods may be
    called from any thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        inbox: str,
        store: str,
        *,
        verify: bool = False,
        patience_s: float = 5.0,
    ) -> None:
        self._inbox: Inbox[ToClient] = Inbox(context, inbox, ToClient)
        self._outbox = Outbox(context)
        self._store, self._verify, self._patience_s = store, verify, patience_s
        self._lock = threading.Lock()  # of the link, and of the numbers of questions
        self._link: Link | None = None
        self._silent: SimpleQueue[Link] = SimpleQueue()
        self._number = 0
        self._met = threading.Event()
        self._closing = False
        self.damaged = 0
        self._thread = threading.Thread(target=self._receive, name="store-client", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int | None:
        """The life of the store that can be asked now."""
        link = self._link
        return None if link is None else link.epoch

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a store; False if there is none by then."""
        return self._met.wait(timeout_s)

    def lookup(self, keys: Sequence[bytes]) -> Available:
        """How many leading blocks are there now."""
        with self._ask(Lookup(list(keys))) as question:
            found = None if question is None else question.answer(Found)
        return Available(0, 0) if found is None else Available(found.blocks, found.in_memory)

    def fetch(self, keys: Sequence[bytes], address: str, limit_s: float) -> int:
        """Let the store bring what it lacks of these blocks from that of another host, which gives them at `address`.

        Returns how many leading blocks are there then, `limit_s` later at the latest.
        """
        with self._ask(Fetch(list(keys), address, limit_s)) as question:
            fetched = None if question is None else question.answer(Fetched, limit_s)
        return 0 if fetched is None else fetched.blocks

    def load(
        self,
        keys: Sequence[bytes],
        copier: Copier,
        blocks: Sequence[int],
        coming: Callable[[int], None] = lambda _count: None,
        on_layer: OnLayer = lambda _layer: None,
    ) -> int:
        """Copy as many leading blocks as are there into the engine's `blocks`; returns how many.

        `coming` is told how many as soon as that is sure: all of them are held, or copied, and nothing can go wrong any
        more. Then `on_layer` is called for each layer in turn when it is there of all these blocks. Where the store
        dies before, they are what was copied until then.
        """
        with self._ask(Load(list(keys))) as question:
            if question is not None:
                return self._load(question, copier, blocks, coming, on_layer)
            coming(0)
            return 0

    def store(
        self,
        keys: Sequence[bytes],
        copier: Copier,
        blocks: Sequence[int],
        start: int = 0,
        computed: Callable[[int], bool] = lambda _layer: True,
    ) -> int:
        """Put the blocks of a prompt from the `start`-th on into the store, as far as they are not there.

        `blocks` are the engine's for all `keys`, and must not change meanwhile. `computed` waits until a layer is in
        them; where it says that it never will be, nothing more is put. Returns how many were put.
        """
        stored = written = 0
        with self._ask(Put(list(keys), start)) as question:
            while question is not None and (leased := question.answer(Leased)) is not None:
                stored += written
                if leased.last:
                    break
                slots, sources = list(leased.slots.values()), [blocks[index] for index in leased.slots]
                whole = _fill(question.memory, slots, copier, sources, computed)
                if whole is None:
                    break
                written = len(whole)
                question.say(Commit(whole))
        return stored

    def close(self) -> None:
        """Ask no more; to be called when nothing is under way."""
        self._closing = True
        self._thread.join()
        self._outbox.close()
        self._inbox.close()

    def _load(
        self,
        question: Question,
        copier: Copier,
        blocks: Sequence[int],
        coming: Callable[[int], None],
        on_layer: OnLayer,
    ) -> int:
        """Blocks that come from the disk come bit by bit: all but the last are copied, and given back, at once."""
        memory, whole = question.memory, set[int]()
        while (held := question.answer(Held)) is not None and not held.last:
            right = self._right(memory, held.blocks)
            for layer in range(copier.layers):
                copier.read(memory, layer, list(right.values()), [blocks[index] for index in right])
            whole.update(right)
            question.say(Release([block.slot for block in held.blocks.values()]))
        right = {} if held is None else self._right(memory, held.blocks)
        count = _leading(whole.union(right))
        slots, targets = list(right.values()), [blocks[index] for index in right]
        coming(count)
        for layer in range(copier.layers):
            copier.read(memory, layer, slots, targets)
            on_layer(layer)
        return count

    @contextmanager
    def _ask(self, what: Asked) -> Iterator[Question | None]:
        """Ask, and say in the end that the question is over; None where there is no store."""
        with self._lock:
            link = self._link
            self._number += 1
            question = None if link is None else link.begin(self._number)
        if link is None or question is None:
            yield None
            return
        question.say(what)
        try:
            yield question
        finally:
            link.over(question)
            question.say(Release())
            if question.silent:
                self._forget(link)
                self._silent.put(link)

    def _right(self, memory: SlotMemory, blocks: Mapping[int, Block]) -> dict[int, int]:
        """The slots of those that are what their writers wrote."""
        right = {index: block.slot for index, block in blocks.items()}
        if self._verify:
            for index, block in blocks.items():
                if zlib.crc32(memory.slot(block.slot)) != block.checksum:
                    log.error("a block in the memory of the store is not as it was written: it is not used")
                    self.damaged += 1
                    del right[index]
        return right

    # -- the store, as it comes and goes ------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._closing:
            self._turn()
        if self._link is not None:
            self._end(self._link)

    def _turn(self) -> None:
        """Hear what is said within `_HELLO_S`; only here is a link made and ended."""
        poll, link = select.poll(), self._link
        poll.register(self._inbox.fileno(), select.POLLIN)
        if link is None:
            self._outbox.send(self._store, Hello(client=self._inbox.address, pid=os.getpid()))
        else:
            poll.register(link.fileno(), select.POLLIN)
        ready = [fd for fd, _ in poll.poll(_HELLO_S * 1000)]
        for message in self._inbox.drain():
            if isinstance(message, Welcome):
                self._meet(message)
            elif self._link is not None and message.epoch == self._link.epoch:
                self._link.hear(message)
        if link is not None and link.fileno() in ready:
            self._end(link)
        while not self._silent.empty():
            self._end(self._silent.get())

    def _meet(self, welcome: Welcome) -> None:
        if self._link is not None:
            return
        try:
            link = Link(welcome, self._say, self._patience_s)
        except (ConfigurationError, OSError):
            return  # that life is over
        with self._lock:
            self._link = link
        self._met.set()

    def _say(self, epoch: int, number: int, what: Asked) -> None:
        self._outbox.send(self._store, Ask(client=self._inbox.address, epoch=epoch, number=number, what=what))

    def _forget(self, link: Link) -> None:
        """Ask nothing more over it."""
        with self._lock:
            if self._link is link:
                self._link = None
                self._met.clear()

    def _end(self, link: Link) -> None:
        self._forget(link)
        link.end()


def _fill(
    memory: SlotMemory,
    slots: Sequence[int],
    copier: Copier,
    blocks: Sequence[int],
    computed: Callable[[int], bool],
) -> list[Block] | None:
    """Write blocks into slots, layer by layer as they are computed; None where one never is."""
    checksums = [0] * len(slots)
    for layer in range(copier.layers):
        if not computed(layer):
            return None
        copier.write(memory, layer, slots, blocks)
        span = copier.span(layer)
        checksums = [
            zlib.crc32(memory.slot(slot)[span], checksum)
            for slot, checksum in zip(slots, checksums, strict=True)
        ]
    return [Block(*block) for block in zip(slots, checksums, strict=True)]


def _leading(indices: set[int]) -> int:
    """How many of 0, 1, 2 … are there."""
    count = 0
    while count in indices:
        count += 1
    return count
