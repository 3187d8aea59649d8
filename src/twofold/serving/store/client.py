"""A worker's client of the KV store on its host. A store that is down appears to be empty."""

import itertools
import logging
import os
import select
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import zmq

from twofold.engine.base import OnLayer
from twofold.errors import ConfigurationError
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.store import messages
from twofold.transport.memory import SharedMemory, SlotMemory

log = logging.getLogger(__name__)

_HELLO_S = 0.2  # interval of registration attempts

R = TypeVar("R", messages.LookupResult, messages.HeldBlocks, messages.LeasedSlots, messages.FetchResult)
SendOperation = Callable[[int, int, messages.StoreOperation], None]  # (epoch, number, operation)


class BlockCopier(Protocol):
    """Copies one layer of KV blocks between an engine's KV pool and the store's slots, which hold one block each."""

    @property
    def layers(self) -> int: ...

    def span(self, layer: int) -> slice:
        """Return the byte range of a layer within a slot. A slot holds the layers in order, without gaps."""

    def read(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy one layer from the store's slots to the engine's blocks: `slots[i]` to `blocks[i]`."""

    def write(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy one layer from the engine's blocks to the store's slots: `blocks[i]` to `slots[i]`."""


class PendingRequest:
    """A request to the KV store, with a queue of its replies."""

    def __init__(
        self, number: int, memory: SlotMemory, send: Callable[[messages.StoreOperation], None], timeout_s: float
    ) -> None:
        self.number, self.memory, self.send = number, memory, send
        self.timed_out = False
        self._timeout_s = timeout_s
        self.replies: SimpleQueue[messages.StoreResult | None] = SimpleQueue()

    def wait(self, kind: type[R], extra_s: float = 0.0) -> R | None:
        """Wait for the next reply. Return None after a timeout, or if the store has exited."""
        try:
            reply = self.replies.get(timeout=extra_s + self._timeout_s)
        except Empty:
            self.timed_out = True
            return None
        return reply if isinstance(reply, kind) else None


class StoreSession:
    """Connection to a running KV store. `fileno()` becomes readable when the store process exits."""

    def __init__(self, welcome: messages.Welcome, send: SendOperation, timeout_s: float) -> None:
        self.epoch = welcome.epoch
        self._send, self._timeout_s = send, timeout_s
        self._pending: dict[int, PendingRequest] = {}
        self._ended = False
        self._pidfd = os.pidfd_open(welcome.pid)  # raises OSError if the store has exited
        try:
            shared = SharedMemory.open(welcome.address, welcome.slots * welcome.block_bytes)
            self._memory = SlotMemory(shared, welcome.block_bytes)
        except ConfigurationError:
            os.close(self._pidfd)
            raise

    def fileno(self) -> int:
        return self._pidfd

    def begin(self, number: int) -> PendingRequest:
        request = PendingRequest(
            number, self._memory, lambda what: self._send(self.epoch, number, what), self._timeout_s
        )
        self._pending[number] = request
        if self._ended:
            request.replies.put(None)
        return request

    def forget(self, request: PendingRequest) -> None:
        """Ignore all further replies to a request."""
        self._pending.pop(request.number, None)

    def receive(self, message: messages.StoreReply) -> None:
        request = self._pending.get(message.number)
        if request is not None:
            request.replies.put(message.what)

    def end(self) -> None:
        """End the session. Pending requests get no reply."""
        if not self._ended:
            self._ended = True
            for request in list(self._pending.values()):
                request.replies.put(None)
            self._memory.close()
            os.close(self._pidfd)


class StoreClient:
    """Thread-safe client of a KV store. It sends to the address `store`, and receives replies at the address `inbox`.
    It reconnects after the store has restarted, or has not replied for `timeout_s` seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        inbox: str,
        store: str,
        *,
        verify: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        self._inbox: Inbox[messages.ToClient] = Inbox(context, inbox, messages.ToClient)
        self._outbox = Outbox(context)
        self._store, self._verify, self._timeout_s = store, verify, timeout_s
        self._lock = threading.Lock()  # guards the session and request numbers
        self._session: StoreSession | None = None
        self._timed_out: SimpleQueue[StoreSession] = SimpleQueue()
        self._number = 0
        self._connected = threading.Event()
        self._closing = False
        self.damaged = 0  # blocks with wrong checksums, which are ignored
        self._thread = threading.Thread(target=self._receive, name="store-client", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int | None:
        """Identifier of the connected store process; None if no store is connected."""
        session = self._session
        return None if session is None else session.epoch

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for a connection to the store; return whether there is one."""
        return self._connected.wait(timeout_s)

    def lookup(self, keys: Sequence[bytes]) -> messages.LookupResult:
        """Return the length of a prompt's cached prefix. `keys` are the block keys of the prompt."""
        with self._request(messages.Lookup(list(keys))) as request:
            found = None if request is None else request.wait(messages.LookupResult)
        return found or messages.LookupResult(0, 0)

    def fetch(self, keys: Sequence[bytes], address: str, limit_s: float) -> int:
        """Tell the local store to copy missing blocks of a prompt from the store at `address`, within `limit_s`
        seconds. Return the length of the cached prefix afterwards, in blocks.
        """
        with self._request(messages.FetchBlocks(list(keys), address, limit_s)) as request:
            fetched = None if request is None else request.wait(messages.FetchResult, limit_s)
        return 0 if fetched is None else fetched.blocks

    def load(
        self,
        keys: Sequence[bytes],
        copier: BlockCopier,
        blocks: Sequence[int],
        on_count: Callable[[int], None] = lambda _count: None,
        on_layer: OnLayer = lambda _layer: None,
    ) -> int:
        """Copy the cached prefix of a prompt from the store to the engine's `blocks`; return its length in blocks.
        `on_count` is called with this length, and then `on_layer` with each layer that has been copied.
        """
        with self._request(messages.Load(list(keys))) as request:
            if request is None:
                on_count(0)
                return 0
            # The store sends blocks in several replies, as it reads them from disk.
            memory, whole = request.memory, set[int]()
            while (held := request.wait(messages.HeldBlocks)) is not None and not held.last:
                intact = self._intact(memory, held.blocks)
                for layer in range(copier.layers):
                    copier.read(memory, layer, list(intact.values()), [blocks[index] for index in intact])
                whole.update(intact)
                request.send(messages.Release([block.slot for block in held.blocks.values()]))
            intact = {} if held is None else self._intact(memory, held.blocks)
            whole.update(intact)
            count = next(index for index in itertools.count() if index not in whole)  # of the leading blocks
            slots, targets = list(intact.values()), [blocks[index] for index in intact]
            on_count(count)
            for layer in range(copier.layers):
                copier.read(memory, layer, slots, targets)
                on_layer(layer)
            return count

    def store(
        self,
        keys: Sequence[bytes],
        copier: BlockCopier,
        blocks: Sequence[int],
        start: int = 0,
        computed: Callable[[int], bool] = lambda _layer: True,
    ) -> int:
        """Copy consecutive blocks to the store, of which the first has index `start` in its request.

        Return the number of copied blocks. `computed` is called with each layer before its copy: it waits until the
        engine has computed the layer, and returns False to end the copy.
        """
        # The caller keeps the blocks allocated during this call. Blocks that the store has already are not copied.
        stored = written = 0
        with self._request(messages.Put(list(keys), start)) as request:
            while request is not None and (leased := request.wait(messages.LeasedSlots)) is not None:
                stored += written
                if leased.last:
                    break
                slots, sources = list(leased.slots.values()), [blocks[index - start] for index in leased.slots]
                whole = _fill(request.memory, slots, copier, sources, computed)
                if whole is None:
                    break
                written = len(whole)
                request.send(messages.Commit(whole))
        return stored

    def close(self) -> None:
        """Stop the client. No request may be pending."""
        self._closing = True
        self._thread.join()
        self._outbox.close()
        self._inbox.close()

    @contextmanager
    def _request(self, what: messages.StoreOperation) -> Iterator[PendingRequest | None]:
        # Yields None without a connection.
        with self._lock:
            session = self._session
            self._number += 1
            request = None if session is None else session.begin(self._number)
        if session is None or request is None:
            yield None
            return
        request.send(what)
        try:
            yield request
        finally:
            session.forget(request)
            request.send(messages.Release())
            if request.timed_out:
                self._forget(session)
                self._timed_out.put(session)

    def _intact(self, memory: SlotMemory, blocks: Mapping[int, messages.Block]) -> dict[int, int]:
        intact = {index: block.slot for index, block in blocks.items()}
        if self._verify:
            for index, block in blocks.items():
                if zlib.crc32(memory.slot(block.slot)) != block.checksum:
                    log.error("checksum mismatch in store memory: block ignored")
                    self.damaged += 1
                    del intact[index]
        return intact

    # -- sessions ---------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._closing:
            self._poll()
        if self._session is not None:
            self._end(self._session)

    def _poll(self) -> None:
        # Only this method opens and closes connections.
        poll, session = select.poll(), self._session
        poll.register(self._inbox.fileno(), select.POLLIN)
        if session is None:
            self._outbox.send(self._store, messages.Hello(client=self._inbox.address, pid=os.getpid()))
        else:
            poll.register(session.fileno(), select.POLLIN)
        ready = [fd for fd, _ in poll.poll(_HELLO_S * 1000)]
        for message in self._inbox.drain():
            if isinstance(message, messages.Welcome):
                self._connect(message)
            elif self._session is not None and message.epoch == self._session.epoch:
                self._session.receive(message)
        if session is not None and session.fileno() in ready:
            self._end(session)
        while not self._timed_out.empty():
            self._end(self._timed_out.get())

    def _connect(self, welcome: messages.Welcome) -> None:
        if self._session is not None:
            return
        try:
            session = StoreSession(welcome, self._send, self._timeout_s)
        except (ConfigurationError, OSError):
            return  # the epoch has ended
        with self._lock:
            self._session = session
        self._connected.set()

    def _send(self, epoch: int, number: int, what: messages.StoreOperation) -> None:
        request = messages.StoreRequest(client=self._inbox.address, epoch=epoch, number=number, what=what)
        self._outbox.send(self._store, request)

    def _forget(self, session: StoreSession) -> None:
        with self._lock:
            if self._session is session:
                self._session = None
                self._connected.clear()

    def _end(self, session: StoreSession) -> None:
        self._forget(session)
        session.end()


def _fill(
    memory: SlotMemory,
    slots: Sequence[int],
    copier: BlockCopier,
    blocks: Sequence[int],
    computed: Callable[[int], bool],
) -> list[messages.Block] | None:
    checksums = [0] * len(slots)
    for layer in range(copier.layers):
        if not computed(layer):
            return None
        copier.write(memory, layer, slots, blocks)
        span = copier.span(layer)
        checksums = [
            zlib.crc32(memory.slot(slot)[span], checksum) for slot, checksum in zip(slots, checksums, strict=True)
        ]
    return [messages.Block(*block) for block in zip(slots, checksums, strict=True)]
