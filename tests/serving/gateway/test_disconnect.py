"""`unless_disconnected` cancels the work of a request when its client disconnects."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from twofold.serving.gateway.streaming import unless_disconnected


async def never():
    await asyncio.Event().wait()


async def leaves():
    return {"type": "http.disconnect"}


def test_returns_the_result_or_error_of_the_work():

    async def good():
        return 7

    async def bad():
        raise OSError("broken")

    assert asyncio.run(unless_disconnected(never, good())) == 7
    with pytest.raises(OSError, match="broken"):
        asyncio.run(unless_disconnected(never, bad()))


def test_a_disconnect_cancels_the_work():
    """ClientDisconnect is raised only after the work has been cancelled and has ended."""
    ended = []

    async def work():
        try:
            await never()
        finally:
            ended.append(True)

    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(leaves, work()))
    assert ended == [True]


def test_cancellation_cancels_the_work():
    ended = []

    async def scenario():
        begun = asyncio.Event()

        async def work():
            begun.set()
            try:
                await never()
            finally:
                ended.append(True)

        task = asyncio.create_task(unless_disconnected(never, work()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert ended == [True]


def test_an_error_after_a_disconnect_is_logged(caplog):

    async def work():
        try:
            await never()
        finally:
            raise OSError("cannot clean up")

    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(leaves, work()))
    assert "cannot clean up" in caplog.text
