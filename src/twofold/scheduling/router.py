"""The router seam: which instance prefills a request, and which decodes it?"""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.pools import Pools
from twofold.scheduling.route import Fetch, Move, Route

__all__ = ["Fetch", "FixedRoles", "Move", "Route", "Router"]


@mypyc_attr(allow_interpreted_subclasses=True)
class Router(ABC):
    """Picks a route for a request from what is known of the instances, which it must not change."""

    @abstractmethod
    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        """None when no instance can take one of the phases. `tokens` is the KV that the request takes in all."""
        ...

    def new_pools(self) -> Pools:
        """Pools for a cluster that is routed by this: those that divide instances otherwise have their own kind."""
        return Pools()

    @abstractmethod
    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        """The role of an instance that is away from its home pool, after some work of it is done; `idle` says that
        nothing is left there."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class FixedRoles(Router):
    """Instances stay what they were started as."""

    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        return load.role
