"""The router seam: which instance prefills a request, and which decodes it?"""

from typing import Protocol

import msgspec

from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.pools import Pools


class Move(msgspec.Struct, frozen=True):
    """An instance is to go to the pool of `role`."""

    instance: str
    role: Role


class Route(msgspec.Struct, frozen=True):
    """Instance ids; equal ones mean that the request is not handed off. `moves` are made first."""

    prefill: str
    decode: str
    moves: tuple[Move, ...] = ()

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode


class Router(Protocol):
    """Picks a route for a request from what is known of the instances, which it must not change."""

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        """None when no instance can take one of the phases. `tokens` is the KV that the request takes in all."""
        ...

    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        """The role of an instance that is away from its home pool, after some work of it is done; `idle` says that
        nothing is left there."""
        ...


class FixedRoles:
    """Instances stay what they were started as."""

    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        return load.role
