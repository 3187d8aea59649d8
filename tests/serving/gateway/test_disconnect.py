"""`unless_disconnected` cancels the work of a request when its client disconnects."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from twofold.serving.gateway.middleware import Departure
from twofold.serving.gateway.streaming import unless_disconnected


async def never():
    await asyncio.Event().wait()


def test_returns_the_result_or_error_of_the_work():

    async def good():
        return 7

    async def bad():
        raise OSError("broken")

    assert asyncio.run(unless_disconnected(Departure(), good())) == 7
    with pytest.raises(OSError, match="broken"):
        asyncio.run(unless_disconnected(Departure(), bad()))


@pytest.mark.parametrize("early", [True, False])
def test_a_disconnect_cancels_the_work(early):
    """ClientDisconnect is raised only after the work has been cancelled and has ended."""
    departure, ended = Departure(), []

    async def work():
        try:
            asyncio.get_running_loop().call_soon(departure.leave)
            await never()
        finally:
            ended.append(True)

    if early:
        departure.leave()
    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(departure, work()))
    assert ended == ([] if early else [True])  # cancelled before its first step


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

        task = asyncio.create_task(unless_disconnected(Departure(), work()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert ended == [True]


def test_an_error_after_a_disconnect_is_logged(caplog):
    departure = Departure()

    async def work():
        try:
            asyncio.get_running_loop().call_soon(departure.leave)
            await never()
        finally:
            raise OSError("cannot clean up")

    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(departure, work()))
    assert "cannot clean up" in caplog.text
