"""An instance: one copy of the model that runs batches, and the role it plays."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(slots=True, eq=False)
class InstanceLoad:
    """What a router knows of an instance.

    `role` is the pool it is in now, `home` the one it was started for. `pending_prefill_tokens`: prompt tokens
    routed here and not yet prefilled. `reserved_tokens`: KV tokens that the requests here, or on their way here,
    may come to hold; `capacity_tokens` what it has room for (None: not known). `prefills` and `decodes`: requests
    routed here for that phase that are not through with it. `requests`: how many there are in either phase.
    `queued` tells how many sequences wait on the instance itself; where nobody can tell, none do.
    """

    id: str
    role: Role
    home: Role
    capacity_tokens: int | None = None
    pending_prefill_tokens: int = 0
    reserved_tokens: int = 0
    prefills: int = 0
    decodes: int = 0
    requests: int = 0
    queued: Callable[[], int] = lambda: 0
    # The pools' own: its place in its pool, and how often its numbers changed.
    place: int = 0
    version: int = 0
