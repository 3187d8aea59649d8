"""The seam between the life of a request and those who do its work: workers of ours, or servers of somebody else."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from twofold.instance import Role
from twofold.scheduling.breaker import Breaker
from twofold.serving.messages import Message


class Worker(Protocol):
    """One of them, as far as requests and operators ask about it; `role` is the one it has or was given."""

    role: Role

    @property
    def instance(self) -> str: ...

    @property
    def state(self) -> StrEnum:
        """Where it is in its life."""
        ...

    @property
    def breaker(self) -> Breaker: ...

    @property
    def retired(self) -> bool:
        """It is given nothing new although it works."""
        ...

    @property
    def restarts(self) -> int: ...


class Workers(Protocol):
    """All of them, by the names that routes have for them."""

    @property
    def members(self) -> Mapping[str, Worker]: ...

    def breaker(self, instance: str) -> Breaker: ...

    def send(self, instance: str, message: Message) -> None:
        """What a request needs of a worker now: Prefill, Reserve, Abort. It is lost where the worker is not up."""
        ...

    def ours(self, instance: str, moment_s: float) -> float:
        """A moment of its monotonic clock on ours."""
        ...
