"""The client of vLLM's KV event stream, tested over real sockets."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from twofold.instance import Role
from twofold.serving.upstream.config import ServerConfig
from twofold.serving.upstream.kv_events import EventFeed

END = (-1).to_bytes(8, "big", signed=True)


def batch(number):
    return msgspec.msgpack.encode([float(number), [], 0])


class Publisher:
    """Stub of vLLM's KV event publisher."""

    def __init__(self, context, replays):
        self._socket, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.events, self.replay = (
            f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
            for server in (self._socket, self._router)
        )
        self._task = asyncio.create_task(self._repeat()) if replays else None
        self.sent = []

    async def send(self, number, *, lose=False):
        self.sent.append(number)
        if not lose:
            await self._socket.send_multipart([b"", number.to_bytes(8, "big"), batch(number)])

    async def _repeat(self):
        while True:
            client, _, first = await self._router.recv_multipart()
            for number in self.sent:
                if number >= int.from_bytes(first, "big"):
                    frames = [client, b"", b"", number.to_bytes(8, "big"), batch(number)]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", b"", END, b""])

    def close(self):
        if self._task is not None:
            self._task.cancel()
        self._socket.close(linger=0)
        self._router.close(linger=0)


def feed(numbers, lost=(), *, replays=False):
    """Publish numbered event batches except those in `lost`; return the received numbers, with "gap" for each gap."""
    heard = []

    async def scenario():
        context = zmq.asyncio.Context()
        publisher = Publisher(context, replays)
        config = ServerConfig(
            instance="one",
            role=Role.PREFILL,
            url="http://one",
            events=publisher.events,
            replay=publisher.replay if replays else None,
        )
        feed = EventFeed(config, context, lambda batch: heard.append(int(batch.ts)), lambda: heard.append("gap"))
        feed.start()
        first, *others = numbers
        while not heard:  # subscribing takes a moment
            await publisher.send(first)
            await asyncio.sleep(0.01)
        for number in others:
            await publisher.send(number, lose=number in lost)
        while numbers[-1] not in heard:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        feed.stop()
        publisher.close()
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(scenario(), 120))
    return heard


def test_receives_batches_in_order():
    assert feed([0, 1, 2, 3])[-4:] == [0, 1, 2, 3]


@pytest.mark.parametrize(("replays", "heard"), [(False, ["gap", 3]), (True, [1, 2, 3])])
def test_missed_batches_are_replayed(replays, heard):
    """Missed event batches are replayed if the feed has a replay address; otherwise the feed reports a gap."""
    assert feed([0, 1, 2, 3], lost=[1, 2], replays=replays)[-len(heard) :] == heard


def test_a_restarted_server_resets_the_feed():
    """A restart of the server is reported like missed event batches."""
    assert feed([5, 6, 0, 1])[-3:] == ["gap", 0, 1]
