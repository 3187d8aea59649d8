"""Ending an answer whose time is over."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from twofold.serving.admitting import deadline_passed

T = TypeVar("T")


async def until(deadline_s: float | None, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield `items` up to a moment of the monotonic clock; then close them and raise RequestError (504)."""
    if deadline_s is None:
        async with aclosing(items):
            async for item in items:
                yield item
        return
    # The loop may have a clock of its own.
    end = asyncio.get_running_loop().time() + deadline_s - time.monotonic()
    async with aclosing(items):
        while True:
            timeout = asyncio.timeout_at(end)
            try:
                async with timeout:
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise deadline_passed() from error
            yield item
