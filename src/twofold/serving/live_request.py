"""A request that is alive in the controller: where it runs and the tokens on their way to its client."""

import asyncio
from collections import deque

from twofold.errors import InstanceLostError
from twofold.request import TokenOutput
from twofold.scheduling.cluster import Placement


class LiveRequest:
    """Puts the tokens of one request in order and hands them to the one task that waits for them.

    The first token comes from the prefill instance and the others from the decode instance, so the second may
    overtake the first on its way here.
    """

    def __init__(self, request_id: str, placement: Placement) -> None:
        self.id = request_id
        self.placement = placement
        self._ordered: deque[TokenOutput] = deque()
        self._early: dict[int, TokenOutput] = {}
        self.next_index = 0
        self._failure: str | None = None
        self._changed = asyncio.Event()

    def push(self, output: TokenOutput) -> list[TokenOutput]:
        """A token arrived; returns the tokens that are now in order, this one and any that waited for it."""
        self._early[output.index] = output
        ordered: list[TokenOutput] = []
        while (ready := self._early.pop(self.next_index, None)) is not None:
            ordered.append(ready)
            self.next_index += 1
        self._ordered.extend(ordered)
        if ordered:
            self._changed.set()
        return ordered

    def fail(self, reason: str) -> None:
        """The request cannot go on; whoever waits is told after the tokens that are there."""
        self._failure = reason
        self._changed.set()

    async def next(self) -> TokenOutput:
        """The next token in order; raises InstanceLostError when there will be none."""
        while not self._ordered:
            if self._failure is not None:
                raise InstanceLostError(self._failure)
            self._changed.clear()
            await self._changed.wait()
        return self._ordered.popleft()
