"""Clients of a fault suite: some read their answer to the end, others leave, come back at once, or read slowly."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, pairwise
from typing import Final

import msgspec
import numpy as np

from twofold.bench.client import Client, Reply, RequestOutcome, StreamChoice
from twofold.torture.prompts import TorturePrompt


class Ending(StrEnum):
    """How a stream ended for its client."""

    COMPLETE = "complete"
    LEFT = "left"  # by the client
    BROKEN = "broken"
    REFUSED = "refused"  # with an HTTP error
    HUNG = "hung"


class ClientBehaviour(msgspec.Struct, frozen=True, kw_only=True):
    """When a client leaves its stream, whether it then sends the prompt again, and how it reads."""

    name: str
    leave_s: float = math.inf  # after it sent the prompt
    leave_chunks: float = math.inf  # received
    retries: bool = False
    pause_s: float = 0.0  # after each read


UNDISTURBED: Final = ClientBehaviour(name="undisturbed")
RETRY: Final = ClientBehaviour(name="retry")
_SHARES: Final = (0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)  # of the behaviours, in the order below


@dataclass
class WatchedReply(Reply):
    """Reply whose client leaves after a number of chunks."""

    leave_chunks: float = math.inf
    leave: Callable[[], object] = lambda: None

    def add(self, choice: StreamChoice, now: float) -> None:
        """Record a chunk that arrived at `now` (s)."""
        super().add(choice, now)
        if len(self.chunk_times_s) >= self.leave_chunks:
            self.leave()


@dataclass(frozen=True, slots=True)
class TortureStream:
    """A stream that has ended: its prompt, its client, its chunks, and how it ended."""

    prompt: TorturePrompt
    behaviour: ClientBehaviour
    started_s: float
    ended_s: float
    reply: Reply
    ending: Ending
    detail: str = ""

    @property
    def output(self) -> Sequence[int] | str:
        """Token ids of the answer, or its text if the server returns no token ids."""
        return self.reply.token_ids or self.reply.text

    def waits(self) -> Iterator[tuple[float, float]]:
        """Yield start and end of each wait for a token."""
        if self.behaviour.pause_s:
            return  # the client itself pauses
        times = [self.started_s, *self.reply.chunk_times_s]
        if self.ending not in (Ending.COMPLETE, Ending.LEFT):
            times.append(self.ended_s)
        yield from pairwise(times)


def draw_behaviour(draw: np.random.Generator, alone: TortureStream) -> ClientBehaviour:
    """Draw the behaviour of a client whose prompt has the answer `alone` on an idle service."""
    times = alone.reply.chunk_times_s
    ttft_s, e2e_s = times[0] - alone.started_s, times[-1] - alone.started_s
    middle = int(draw.integers(2, max(3, len(times))))
    behaviours = (
        UNDISTURBED,
        ClientBehaviour(name="leaves in prefill", leave_s=draw.uniform(0.0, ttft_s), leave_chunks=1),
        ClientBehaviour(name="leaves at the hand-off", leave_chunks=1),
        ClientBehaviour(name="leaves in decode", leave_chunks=middle),
        ClientBehaviour(name="leaves and retries", leave_chunks=int(draw.integers(1, middle)), retries=True),
        ClientBehaviour(name="reads slowly", pause_s=draw.uniform(0.02, 0.2)),
        ClientBehaviour(name="deadline", leave_s=draw.uniform(0.2, 1.0) * e2e_s),
    )
    return behaviours[int(draw.choice(len(behaviours), p=_SHARES))]


class TortureClient:
    """Client that streams greedy answers and watches them: an answer without a token for `hang_s` is cancelled."""

    def __init__(self, client: Client, seed: int, hang_s: float) -> None:
        self._client, self._seed, self._hang_s = client, seed, hang_s
        self._numbers = count()

    async def stream(
        self, prompt: TorturePrompt, behaviour: ClientBehaviour = UNDISTURBED, **fields: object
    ) -> TortureStream:
        """Stream the answer to a prompt. `fields` are added to the body of the request."""
        request = msgspec.structs.replace(prompt.request, id=f"{prompt.request.id}/{next(self._numbers)}")
        body = self._client.body(request, prompt.prompt, seed=self._seed, return_token_ids=True, **fields)
        reply = WatchedReply(keeps_output=True, pause_s=behaviour.pause_s, leave_chunks=behaviour.leave_chunks)
        started_s = time.monotonic()
        sending = asyncio.create_task(self._client.send(request, body, reply))
        reply.leave = sending.cancel
        try:
            hung = await self._hangs(sending, reply, started_s, behaviour.leave_s)
        finally:
            sending.cancel()
            await asyncio.wait({sending})
        ending, detail = _ending(sending, reply)
        if ending is Ending.LEFT and hung:
            ending, detail = Ending.HUNG, f"no token for {self._hang_s:g} s after {len(reply.chunk_times_s)} chunks"
        return TortureStream(prompt, behaviour, started_s, time.monotonic(), reply, ending, detail)

    async def _hangs(
        self, sending: "asyncio.Task[RequestOutcome]", reply: Reply, started_s: float, leave_s: float
    ) -> bool:
        """Wait until the stream has ended, its client leaves (False), or it hangs (True)."""
        while not sending.done():
            now, last_s = time.monotonic(), reply.chunk_times_s[-1] if reply.chunk_times_s else started_s
            left_s, quiet_s = started_s + leave_s - now, last_s + self._hang_s - now
            if min(left_s, quiet_s) <= 0.0:
                return quiet_s <= left_s
            await asyncio.wait({sending}, timeout=min(left_s, quiet_s))
        return False


def _ending(sending: "asyncio.Task[RequestOutcome]", reply: Reply) -> tuple[Ending, str]:
    if sending.cancelled():
        return Ending.LEFT, ""
    outcome = sending.result()
    if outcome.error is not None:
        refused = outcome.error.startswith("HTTP ")
        return Ending.REFUSED if refused else Ending.BROKEN, f"{outcome.error}: {outcome.detail}"
    if not reply.done:
        return Ending.BROKEN, "the stream ended without [DONE]"
    return Ending.COMPLETE, ""
