"""Ending work whose client has left."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Await `work`; cancel it and raise ClientDisconnect where the client leaves first.

    The request's body must have been read before, because this reads what comes after it. `work` has ended,
    one way or the other, when this returns or raises.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _cancel(leaving)
        await _cancel(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: "asyncio.Task[T]") -> None:
    """Cancel a task and wait until it has ended."""
    if task.done():
        return
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is not None:
        logger.error("an error while ending the work of a client that left", exc_info=task.exception())
