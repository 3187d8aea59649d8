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
    """The entry of an instance in the heap that ranks the instances of its pool: the sort key and the heap position."""

    __slots__ = ("load", "number", "position")

    def __init__(self, load: "InstanceLoad", number: int, position: int) -> None:
        self.load = load
        self.number: i64 = number
        self.position: i64 = position


class LoadTotals:
    """The numbers of a load that can be added over requests and instances. `InstanceLoad` explains each number."""

    def __init__(
        self,
        pending_prefill_tokens: int = 0,
        reserved_tokens: int = 0,
        prefills: int = 0,
        decodes: int = 0,
        requests: int = 0,
    ) -> None:
        self.pending_prefill_tokens = pending_prefill_tokens
        self.reserved_tokens = reserved_tokens
        self.prefills = prefills
        self.decodes = decodes
        self.requests = requests

    def less(self, other: "LoadTotals") -> "LoadTotals":
        """Return the difference of each number: these numbers minus those of `other`."""
        return LoadTotals(
            self.pending_prefill_tokens - other.pending_prefill_tokens,
            self.reserved_tokens - other.reserved_tokens,
            self.prefills - other.prefills,
            self.decodes - other.decodes,
            self.requests - other.requests,
        )

    def replace(self, old: "LoadTotals", new: "LoadTotals") -> None:
        """Subtract the numbers of `old` from this load and add the numbers of `new`."""
        self.pending_prefill_tokens += new.pending_prefill_tokens - old.pending_prefill_tokens
        self.reserved_tokens += new.reserved_tokens - old.reserved_tokens
        self.prefills += new.prefills - old.prefills
        self.decodes += new.decodes - old.decodes
        self.requests += new.requests - old.requests


NO_LOAD = LoadTotals()


class InstanceLoad(LoadTotals):
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
    place, standings: belong to the pools; the place is the order of joining its pool, 0 if it is in none.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (the name used everywhere)
        role: Role,
        capacity_tokens: int | None = None,
        cell: str = "",
    ) -> None:
        super().__init__()
        self.id = id
        self.role = self.home = role
        self.capacity_tokens = capacity_tokens
        self.queued: Callable[[], int] = lambda: 0
        self.place = 0
        self.cache = id
        self.cell = cell
        self.standings: list[HeapEntry] = []
