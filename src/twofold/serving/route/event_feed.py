"""The events of one server's prefix cache, in order, over ZeroMQ; what was missed is asked for again."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from twofold.serving.route.config import ServerConfig
from twofold.serving.route.kv_events import EventBatch, decode

log = logging.getLogger(__name__)

REPLAY_S = 5.0
_FRAMES = 3  # topic, number, events
_END = (-1).to_bytes(8, "big", signed=True)


class EventFeed:
    """Follows a server from `start` to `stop`. `on_events` gets each batch, `on_gap` is called where some are lost.

    Batches are numbered from 0 on in each life of a server. A feed that begins in the middle, or misses some, asks
    `replay` for them; without it the blocks of which nothing was heard are not known.
    """

    def __init__(
        self,
        config: ServerConfig,
        context: "zmq.asyncio.Context",
        on_events: Callable[[EventBatch], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._config, self._context = config, context
        self._on_events, self._on_gap = on_events, on_gap
        self._next = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """To be called inside the running event loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        assert self._config.events is not None  # noqa: S101  (there is no feed without)
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(self._config.events)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == _FRAMES:
                    await self._take(int.from_bytes(frames[1], "big"), frames[2])

    async def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:  # it was started again
            self._on_gap()
            self._next = 0
        if number > self._next:
            await self._catch_up(number)
        if number >= self._next:
            self._read(number, payload)

    async def _catch_up(self, number: int) -> None:
        """Have the batches before this one; where some cannot be had, what was known may be wrong."""
        missed = [] if self._config.replay is None else await self._replayed(self._config.replay)
        for each, payload in missed:
            if self._next == each < number:
                self._read(each, payload)
        if self._next < number:
            log.info("%s: events %d to %d were missed", self._config.instance, self._next, number - 1)
            self._on_gap()

    async def _replayed(self, address: str) -> list[tuple[int, bytes]]:
        """What the server still has of the batches from the next one on."""
        found: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            try:
                async with asyncio.timeout(REPLAY_S):
                    await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
                    while (frames := await socket.recv_multipart())[-2] != _END:
                        found.append((int.from_bytes(frames[-2], "big"), frames[-1]))
            except TimeoutError:
                log.warning("%s does not repeat events at %s", self._config.instance, address)
        return found

    def _read(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            batch = decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("%s publishes something else than KV events: %s", self._config.instance, error)
            self._on_gap()
            return
        self._on_events(batch)
