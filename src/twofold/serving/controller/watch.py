"""What is looked after when nobody says anything: who is silent, who has retired, and who has waited for too long."""

import asyncio
import time

from twofold.serving.controller.elsewhere import Elsewhere
from twofold.serving.controller.incoming import Incoming
from twofold.serving.controller.members import Members
from twofold.serving.controller.requests import Requests
from twofold.serving.fleet import ALIVE_S


class Watch:
    """Looks around every `ALIVE_S` from `start` until `stop`."""

    def __init__(
        self, incoming: Incoming, requests: Requests, members: Members, elsewhere: Elsewhere | None
    ) -> None:
        self._incoming, self._requests = incoming, requests
        self._members, self._elsewhere = members, elsewhere
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        """To be called inside the running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._incoming.drain()  # what they said while this process had no time is heard before they are judged
            if self._elsewhere is not None:
                self._elsewhere.look(time.monotonic())
            self._members.look(time.monotonic())
            self._requests.look()
