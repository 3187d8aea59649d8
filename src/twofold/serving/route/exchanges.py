"""The attempts that run on servers, each in a task of its own, and what becomes of those that cannot go on."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from twofold.errors import RequestError
from twofold.serving.controller.requests import Requests
from twofold.serving.messages import Prefill
from twofold.serving.route.client import RefusedError
from twofold.serving.route.exchange import AttemptLostError, Exchange, Listener
from twofold.serving.route.servers import Servers

log = logging.getLogger(__name__)


class Exchanges:
    """Implements `Runner`; `on_trouble` is told of servers that failed an attempt, and why."""

    def __init__(
        self,
        servers: Servers,
        requests: Requests,
        listener: Listener,
        on_trouble: Callable[[str, str], object],
    ) -> None:
        self._servers, self._requests, self._listener = servers, requests, listener
        self._on_trouble = on_trouble
        self._running: dict[str, tuple[Exchange, asyncio.Task[None]]] = {}
        self._later: set[asyncio.Task[None]] = set()

    def begin(self, message: Prefill, prefill: str) -> None:
        """Run an attempt that is prefilled there."""
        attempt_id, members = message.generation.request.id, self._servers.members
        live = self._requests.of(attempt_id)
        attempt = None if live is None else live.attempt
        if attempt is None:
            return
        exchange = Exchange(
            message.generation,
            attempt.first_index,
            members[prefill],
            members[prefill if message.target is None else message.target],
            self._listener,
            self._do_later,
        )
        task = asyncio.create_task(self._run(attempt_id, exchange))
        self._running[attempt_id] = (exchange, task)

    def abort(self, attempt_id: str) -> None:
        """Stop listening to its answers, which ends it on the servers; to be called for one that is over as well."""
        _, task = self._running.pop(attempt_id, (None, None))
        if task is not None:
            task.cancel()

    def lost(self, instance: str, reason: str) -> None:
        """A server does not work: what needs it begins anew elsewhere."""
        for attempt_id, (exchange, _) in list(self._running.items()):
            if any(server.instance == instance for server in exchange.needs):
                self._requests.replay(attempt_id, instance, reason)

    async def close(self) -> None:
        """End all that still runs."""
        tasks = [task for _, task in self._running.values()] + list(self._later)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, attempt_id: str, exchange: Exchange) -> None:
        try:
            await exchange.run()
        except AttemptLostError as error:
            if self._over(attempt_id):
                if error.trouble:
                    self._on_trouble(error.instance, str(error))
                self._requests.replay(attempt_id, error.instance, str(error))
                self._requests.place_waiting()
        except RefusedError as error:
            live = self._requests.of(attempt_id)
            if self._over(attempt_id) and live is not None:
                self._requests.fail(live, RequestError(str(error), status=error.status))
        except Exception:
            log.exception("attempt %s", attempt_id)
            if self._over(attempt_id):
                self._requests.replay(attempt_id, exchange.prefill.instance, "an error of our own")
        finally:
            self._over(attempt_id)

    def _over(self, attempt_id: str) -> bool:
        """Nothing runs of this attempt any more; False if that was known."""
        return self._running.pop(attempt_id, None) is not None

    def _do_later(self, what: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(what)
        self._later.add(task)
        task.add_done_callback(self._later.discard)
