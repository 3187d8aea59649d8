"""Several asynchronous generators as one, in the order in which their items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

T = TypeVar("T")


class _End(msgspec.Struct, frozen=True):
    """A source is exhausted, or failed."""

    error: Exception | None


async def interleave(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield every item of every source; the first error ends all. Closing it closes every source first."""
    if len(sources) == 1:  # the common case needs neither a task nor a queue
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        running = len(tasks)
        while running:
            arrived = await queue.get()
            if not isinstance(arrived, _End):
                yield arrived
            elif arrived.error is not None:
                raise arrived.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[T, None], queue: "asyncio.Queue[T | _End]") -> None:
    error: Exception | None = None
    try:
        async with aclosing(source):
            async for item in source:
                queue.put_nowait(item)
    except Exception as caught:  # noqa: BLE001 it is raised again on the other side of the queue
        error = caught
    queue.put_nowait(_End(error))
