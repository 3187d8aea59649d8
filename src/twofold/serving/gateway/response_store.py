"""Store of the responses that `previous_response_id` continues."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from twofold.serving.gateway.schemas import InputMessage, invalid
from twofold.serving.gateway.tools.families import Json


class StoredResponse(NamedTuple):
    """A response, and the messages of its conversation up to and with its output."""

    body: Json
    messages: Sequence[InputMessage]
    input: Sequence[Json]  # items of this request alone
    session: str  # the cache key of the conversation, which by default is the id of its first response
    bytes: int  # without the messages of earlier responses of its conversation
    until_s: float = inf  # set by the store


class ResponseStore:
    """Keeps the latest responses, for `lifetime_s` seconds within `limit_bytes` bytes, for the API key of each."""

    def __init__(self, limit_bytes: int, lifetime_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._lifetime_s, self._clock = limit_bytes, lifetime_s, clock
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # oldest first
        self._bytes = 0

    def put(self, key: str, response: StoredResponse) -> None:
        """Store a response."""
        self._responses[key, response.body["id"]] = response._replace(until_s=self._clock() + self._lifetime_s)
        self._bytes += response.bytes
        while self._responses and (self._bytes > self._limit or self._expired(next(iter(self._responses.values())))):
            self._bytes -= self._responses.popitem(last=False)[1].bytes

    def get(self, key: str, response_id: str, field: str, *, status: int = 404) -> StoredResponse:
        """Return a stored response. Raises RequestError with `status` if there is none with this id."""
        stored = self._responses.get((key, response_id))
        if stored is None or self._expired(stored):
            raise invalid(
                field, f"there is no stored response {response_id!r}", status=status, code="previous_response_not_found"
            )
        return stored

    def delete(self, key: str, response_id: str) -> None:
        """Forget a response. Raises RequestError (404) if there is none with this id."""
        self._bytes -= self.get(key, response_id, "response_id").bytes
        del self._responses[key, response_id]

    def _expired(self, stored: StoredResponse) -> bool:
        return stored.until_s <= self._clock()
