"""Instances: one copy of the model that runs batches, its role and its load."""

from collections.abc import Callable
from enum import StrEnum

from mypy_extensions import i64


class Role(StrEnum):
    """The phases that an instance runs (Splitwise section 4.1: prompt, token and mixed pools)."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class HeapEntry:
    """The entry of an instance in a heap that ranks its pool: its key and position."""

    __slots__ = ("load", "number", "position")

    def __init__(self, load: "InstanceLoad", number: int, position: int) -> None:
        self.load = load
        self.number: i64 = number
        self.position: i64 = position


class InstanceLoad:
    """The load of an instance, as routers see it.

    role: the current pool.
    home: the pool the instance was started for.
    pending_prefill_tokens: prompt tokens routed to the instance and not yet prefilled.
    reserved_tokens: KV tokens that its requests may come to hold, including those on their way.
    capacity_tokens: KV tokens that fit in its memory, None if unknown.
    prefills, decodes: requests routed to it for that phase that have not completed it.
    requests: requests in either phase.
    queued: returns the number of sequences waiting on the instance, 0 if unknown.
    cache: the prefix cache it uses, its own or one shared with other instances of its host.
    cell: the group of nearby instances it belongs to, if the router uses cells.
    """

    # `place` (the order of joining its pool, 0 if it is in none) and `standings` belong to the pools.
    __slots__ = (
        "cache",
        "capacity_tokens",
        "cell",
        "decodes",
        "home",
        "id",
        "pending_prefill_tokens",
        "place",
        "prefills",
        "queued",
        "requests",
        "reserved_tokens",
        "role",
        "standings",
    )

    def __init__(
        self,
        id: str,  # noqa: A002  (the name used everywhere)
        role: Role,
        home: Role,
        capacity_tokens: int | None = None,
        pending_prefill_tokens: int = 0,
        reserved_tokens: int = 0,
        prefills: int = 0,
        decodes: int = 0,
        requests: int = 0,
        queued: Callable[[], int] = lambda: 0,
        place: int = 0,
        cell: str = "",
    ) -> None:
        self.id = id
        self.role = role
        self.home = home
        self.capacity_tokens = capacity_tokens
        self.pending_prefill_tokens = pending_prefill_tokens
        self.reserved_tokens = reserved_tokens
        self.prefills = prefills
        self.decodes = decodes
        self.requests = requests
        self.queued = queued
        self.place = place
        self.cache = id
        self.cell = cell
        self.standings: list[HeapEntry] = []
