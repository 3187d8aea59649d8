"""What others than we have asked of a server: it is in the server's metrics, and not in our own accounts."""

import msgspec

from twofold.instance import InstanceLoad
from twofold.scheduling.pools import Pools
from twofold.serving.route.exposition import Readings


class Foreign(msgspec.Struct, frozen=True):
    """Requests of others: prompts that wait, requests that run, and the tokens of KV that they hold."""

    waiting: int = 0
    running: int = 0
    mean_prompt: int = 0
    kv_tokens: int = 0

    @property
    def requests(self) -> int:
        return self.waiting + self.running

    @property
    def prompt_tokens(self) -> int:
        return self.waiting * self.mean_prompt


class Others:
    """Adds the work of others to the loads that routers go by, as if it had been placed by us.

    A request of ours is on a server a little later than in our accounts, or a little longer; so only as many count as
    foreign as two readings in a row say. An engine that has made no step in between has nothing to run, whatever it
    said last.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._steps: dict[str, int] = {}
        self._read: dict[str, Foreign] = {}
        self._added: dict[str, Foreign] = {}

    def read(self, instance: str, readings: Readings) -> None:
        """A server has told how it is."""
        load = self._pools.get(instance)
        if load is None:
            return
        added, before = self._added.get(instance, Foreign()), self._read.get(instance, Foreign())
        stands = self._steps.get(instance) == readings.steps
        found = Foreign() if stands else _foreign(readings, load, added)
        self._steps[instance], self._read[instance] = readings.steps, found
        self._put(load, added, _less(found, before))

    def forget(self, instance: str) -> None:
        """A server is gone, and whatever was on it."""
        self._read.pop(instance, None)
        load = self._pools.get(instance)
        if load is not None:
            self._put(load, self._added.get(instance, Foreign()), Foreign())

    def _put(self, load: InstanceLoad, before: Foreign, now: Foreign) -> None:
        self._added[load.id] = now
        load.pending_prefill_tokens += now.prompt_tokens - before.prompt_tokens
        load.prefills += now.waiting - before.waiting
        load.decodes += now.running - before.running
        load.requests += now.requests - before.requests
        load.reserved_tokens += now.kv_tokens - before.kv_tokens
        if load.place:
            self._pools.changed(load)


def _foreign(readings: Readings, load: InstanceLoad, added: Foreign) -> Foreign:
    """What of the readings is not ours; `added` of the load is not ours either."""
    ours = load.requests - added.requests
    foreign = max(0, readings.running + readings.waiting - ours)
    waiting = min(foreign, readings.waiting)
    kv_tokens = max(0, readings.used_tokens - (load.reserved_tokens - added.kv_tokens)) if foreign else 0
    return Foreign(waiting, foreign - waiting, round(readings.mean_prompt), kv_tokens)


def _less(one: Foreign, other: Foreign) -> Foreign:
    return Foreign(
        min(one.waiting, other.waiting),
        min(one.running, other.running),
        one.mean_prompt,
        min(one.kv_tokens, other.kv_tokens),
    )
