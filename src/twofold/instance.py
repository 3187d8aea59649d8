"""An instance: one copy of the model that runs batches, and the role it plays."""

from collections.abc import Callable
from enum import StrEnum

from mypy_extensions import i64


class Role(StrEnum):
    """Which phases an instance runs (Splitwise section 4.1: prompt, token and mixed pools)."""

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
    """Where an instance stands in a ranking of its pool: the number that it is ranked by, and its place in a heap."""

    __slots__ = ("load", "number", "position")

    def __init__(self, load: "InstanceLoad", number: int, position: int) -> None:
        self.load = load
        self.number: i64 = number
        self.position: i64 = position


class InstanceLoad:
    """What a router knows of an instance.

    `role` is the pool it is in now, `home` the one it was started for. `pending_prefill_tokens`: prompt tokens
    routed here and not yet prefilled. `reserved_tokens`: KV tokens that the requests here, or on their way here,
    may come to hold; `capacity_tokens` what it has room for (None: not known). `prefills` and `decodes`: requests
    routed here for that phase that are not through with it. `requests`: how many there are in either phase.
    `queued` tells how many sequences wait on the instance itself; where nobody can tell, none do.
    `cache` names the prefix cache that it reuses blocks of: its own, or one that it shares with others on its host.
    `cell` names the group of instances near each other that it belongs to; where nobody divides them, all are one.
    """

    # The pools' own: as the how-manieth it joined its pool, 0 where it is in none, and how it stands there.
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
        id: str,  # noqa: A002  (an instance is called what it is everywhere)
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
