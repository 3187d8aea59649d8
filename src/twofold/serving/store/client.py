"""One life of a store, as one of its clients knows it.

A worker's end of its host's store.

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
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import zmq

from twofold.engine.base import OnLayer
from twofold.errors import ConfigurationError
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import (
    Block,
    Commit,
    FetchBlocks,
    FetchResult,
    HeldBlocks,
    Hello,
    LeasedSlots,
    Load,
    Lookup,
    LookupResult,
    Put,
    Release,
    StoreOperation,
    StoreReply,
    StoreRequest,
    StoreResult,
    ToClient,
    Welcome,
)

R = TypeVar("R", LookupResult, HeldBlocks, LeasedSlots, FetchResult)
SendOperation = Callable[[int, int, StoreOperation], None]  # (epoch, number of the question, what is asked)


class PendingRequest:
    """Something that is asked of one life of a store, and what that answers; `memory` is that life's."""

    def __init__(
        self, number: int, memory: SlotMemory, say: Callable[[StoreOperation], None], patience_s: float
    ) -> None:
        self.number, self.memory, self.say = number, memory, say
        self.silent = False  # it was not answered in time
        self._patience_s = patience_s
        self._answers: SimpleQueue[StoreResult | None] = SimpleQueue()

    def answer(self, kind: type[R], after_s: float = 0.0) -> R | None:
        """Wait for the next answer; None where there will be none, because the store is dead or silent.

        It is silent when `after_s`, which it was given for the answer, and the patience with it are over.
        """
        try:
            answer = self._answers.get(timeout=after_s + self._patience_s)
        except Empty:
            self.silent = True
            return None
        return answer if isinstance(answer, kind) else None

    def hear(self, answer: StoreResult | None) -> None:
        self._answers.put(answer)


class StoreSession:
    """A life of a store: its epoch, its memory, its end (`fileno` is readable then) and the questions under way."""

    def __init__(self, welcome: Welcome, say: SendOperation, patience_s: float) -> None:
        """Raises ConfigurationError or OSError where that life is over."""
        self.epoch = welcome.epoch
        self._say, self._patience_s = say, patience_s
        self._questions: dict[int, PendingRequest] = {}
        self._ended = False
        self._pidfd = os.pidfd_open(welcome.pid)
        try:
            self._memory = SlotMemory.open(welcome.address, welcome.slots, welcome.block_bytes)
        except ConfigurationError:
            os.close(self._pidfd)
            raise

    def fileno(self) -> int:
        return self._pidfd

    def begin(self, number: int) -> PendingRequest:
        question = PendingRequest(
            number, self._memory, lambda what: self._say(self.epoch, number, what), self._patience_s
        )
        self._questions[number] = question
        if self._ended:
            question.hear(None)
        return question

    def over(self, question: PendingRequest) -> None:
        """Nothing that is still answered to it matters."""
        self._questions.pop(question.number, None)

    def hear(self, message: StoreReply) -> None:
        question = self._questions.get(message.number)
        if question is not None:
            question.hear(message.what)

    def end(self) -> None:
        """This life is over: no question will be answered any more. Its memory stays, for those who still read it."""
        if not self._ended:
            self._ended = True
            for question in list(self._questions.values()):
                question.hear(None)
            self._memory.close()
            os.close(self._pidfd)


log = logging.getLogger(__name__)

_HELLO_S = 0.2  # between two times that a store is asked whether it is there


class BlockCopier(Protocol):
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


class StoreMatch(NamedTuple):
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
        self._link: StoreSession | None = None
        self._silent: SimpleQueue[StoreSession] = SimpleQueue()
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

    def lookup(self, keys: Sequence[bytes]) -> StoreMatch:
        """How many leading blocks are there now."""
        with self._ask(Lookup(list(keys))) as question:
            found = None if question is None else question.answer(LookupResult)
        return StoreMatch(0, 0) if found is None else StoreMatch(found.blocks, found.in_memory)

    def fetch(self, keys: Sequence[bytes], address: str, limit_s: float) -> int:
        """Let the store bring what it lacks of these blocks from that of another host, which gives them at `address`.

        Returns how many leading blocks are there then, `limit_s` later at the latest.
        """
        with self._ask(FetchBlocks(list(keys), address, limit_s)) as question:
            fetched = None if question is None else question.answer(FetchResult, limit_s)
        return 0 if fetched is None else fetched.blocks

    def load(
        self,
        keys: Sequence[bytes],
        copier: BlockCopier,
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
        copier: BlockCopier,
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
            while question is not None and (leased := question.answer(LeasedSlots)) is not None:
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
        question: PendingRequest,
        copier: BlockCopier,
        blocks: Sequence[int],
        coming: Callable[[int], None],
        on_layer: OnLayer,
    ) -> int:
        """Blocks that come from the disk come bit by bit: all but the last are copied, and given back, at once."""
        memory, whole = question.memory, set[int]()
        while (held := question.answer(HeldBlocks)) is not None and not held.last:
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
    def _ask(self, what: StoreOperation) -> Iterator[PendingRequest | None]:
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
            link = StoreSession(welcome, self._say, self._patience_s)
        except (ConfigurationError, OSError):
            return  # that life is over
        with self._lock:
            self._link = link
        self._met.set()

    def _say(self, epoch: int, number: int, what: StoreOperation) -> None:
        self._outbox.send(
            self._store, StoreRequest(client=self._inbox.address, epoch=epoch, number=number, what=what)
        )

    def _forget(self, link: StoreSession) -> None:
        """Ask nothing more over it."""
        with self._lock:
            if self._link is link:
                self._link = None
                self._met.clear()

    def _end(self, link: StoreSession) -> None:
        self._forget(link)
        link.end()


def _fill(
    memory: SlotMemory,
    slots: Sequence[int],
    copier: BlockCopier,
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
