"""Ending an answer whose time is over."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from twofold.serving.admitting import deadline_passed

T = TypeVar("T")


async def until(deadline_s: float | None, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield `items` up to a moment of the monotonic clock; then close them and raise RequestError (504).

    To be iterated by one task.
    """
    alarm = None if deadline_s is None else _Alarm(deadline_s)
    try:
        async with aclosing(items):
            async for item in items:
                if alarm is None:
                    yield item
                    continue
                alarm.waiting = False
                yield item
                alarm.waiting = True
                if alarm.rang:
                    alarm.ring_again()
    except asyncio.CancelledError as error:
        if alarm is None or not alarm.is_why():
            raise
        raise deadline_passed() from error
    finally:
        if alarm is not None:
            alarm.stop()


class _Alarm:
    """One timer for a whole answer, not one for each token. It cancels the task only where that waits for an item.

    What it may not interrupt is the task's work with an item, which is not ours.
    """

    def __init__(self, deadline_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  (a coroutine runs in a task; tells the type checker so)
        self.waiting, self.rang = True, False
        self._task, self._cancelling, self._cancelled = task, task.cancelling(), False
        left_s = max(0.0, deadline_s - time.monotonic())
        self._timer: asyncio.Handle = asyncio.get_running_loop().call_later(left_s, self._ring)

    def is_why(self) -> bool:
        """Whether the task was cancelled by this alone; to be asked once."""
        if not self._cancelled:
            return False
        self._cancelled = False
        return self._task.uncancel() <= self._cancelling

    def stop(self) -> None:
        self._timer.cancel()
        self.is_why()  # where something else was raised, nobody must take the cancellation for their own

    def ring_again(self) -> None:
        """It rang while nothing was waited for. What is there already, as the end of the items, comes all the same."""
        self._timer = asyncio.get_running_loop().call_soon(self._ring)

    def _ring(self) -> None:
        self.rang = True
        if self.waiting:
            self._cancelled = True
            self._task.cancel()
