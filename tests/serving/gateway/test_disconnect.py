"""Work that ends when its client leaves."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from twofold.serving.gateway.streaming import unless_disconnected


async def never():
    await asyncio.Event().wait()


async def leaves():
    return {"type": "http.disconnect"}


def test_work_that_finishes_wins():
    """The result of the work comes through, and so does its error."""

    async def good():
        return 7

    async def bad():
        raise OSError("broken")

    assert asyncio.run(unless_disconnected(never, good())) == 7
    with pytest.raises(OSError, match="broken"):
        asyncio.run(unless_disconnected(never, bad()))


def test_a_client_that_leaves_ends_the_work():
    """The work is cancelled, and has ended when ClientDisconnect is raised."""
    ended = []

    async def work():
        try:
            await never()
        finally:
            ended.append(True)

    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(leaves, work()))
    assert ended == [True]


def test_cancelling_ends_the_work():
    """A server that cancels the answer ends the work behind it."""
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


def test_an_error_while_ending_is_logged(caplog):
    """What goes wrong after the client left is told to the log, the only one left to tell."""

    async def work():
        try:
            await never()
        finally:
            raise OSError("cannot clean up")

    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(leaves, work()))
    assert "cannot clean up" in caplog.text
