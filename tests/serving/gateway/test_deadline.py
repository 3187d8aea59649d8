"""`until_deadline`: iteration over an asynchronous generator until a deadline."""

import asyncio
import time
from contextlib import aclosing

import pytest

from twofold.errors import RequestError
from twofold.serving.gateway.streaming import until_deadline

SOON = 0.05


class Items:
    """Asynchronous generator that yields the integers from 0 to `ready` − 1, then ends or waits forever."""

    def __init__(self, ready, *, ends=False):
        self.ready, self.ends, self.closed = ready, ends, False

    async def __call__(self):
        try:
            for number in range(self.ready):
                yield number
            if not self.ends:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def read(items, deadline_s, got=None):
    got = [] if got is None else got
    async with aclosing(until_deadline(deadline_s, items())) as answer:
        async for item in answer:
            got.append(item)
    return got


def soon():
    return time.monotonic() + SOON


def test_all_items_come_before_a_late_deadline():
    assert asyncio.run(read(Items(3, ends=True), time.monotonic() + 100)) == [0, 1, 2]


@pytest.mark.parametrize("ready", [0, 2])
def test_the_deadline_ends_the_wait_for_an_item(ready):
    """When the deadline passes, the stream of items is closed and an error with status 504 is raised."""

    async def check():
        items, got = Items(ready), []
        with pytest.raises(RequestError) as raised:
            await read(items, soon(), got)
        assert raised.value.status == 504
        assert (got, items.closed) == (list(range(ready)), True)
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)  # a pending cancellation would arrive here

    asyncio.run(check())


@pytest.mark.parametrize("ends", [True, False])
def test_work_with_an_item_is_not_interrupted(ends):
    """A deadline does not interrupt a consumer that is processing an item from the stream."""

    async def check():
        items, deadline_s, got = Items(1, ends=ends), soon(), []
        try:
            async for item in until_deadline(deadline_s, items()):
                await asyncio.sleep(3 * SOON)
                assert time.monotonic() > deadline_s
                got.append(item)
        except RequestError:
            assert not ends
        else:
            assert ends
        assert got == [0]
        await asyncio.sleep(0)

    asyncio.run(check())


def test_other_cancellations_pass_through():
    """A cancellation by a client disconnect is not reported as an expired deadline."""

    async def check():
        items = Items(0)
        task = asyncio.create_task(read(items, time.monotonic() + 100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert items.closed

    asyncio.run(check())


def test_cancellation_wins_over_a_simultaneous_deadline():

    async def check():
        task = asyncio.create_task(read(Items(0), soon()))
        await asyncio.sleep(0)
        time.sleep(2 * SOON)  # noqa: ASYNC251 (makes the timer due before the loop runs it)
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())


def test_errors_of_the_generator_pass_through():
    async def items():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError from None
        yield 1

    async def check():
        with pytest.raises(KeyError):
            await read(items, soon())
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(check())
