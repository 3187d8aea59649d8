"""Where a request runs.

The router seam: which instance prefills a request, and which decodes it?
"""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from twofold.handoff import HandoffMode
from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools


class RoleMove:
    """An instance is to go to the pool of `role`."""

    __slots__ = ("instance", "role")

    def __init__(self, instance: str, role: Role) -> None:
        self.instance = instance
        self.role = role

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoleMove) and self.instance == other.instance and self.role is other.role

    def __hash__(self) -> int:
        return hash((self.instance, self.role))

    def __repr__(self) -> str:
        return f"Move({self.instance!r}, {self.role!r})"


class PrefixFetch:
    """The first `blocks` blocks of a prompt are to be in the cache where it is prefilled: those that are not come from
    the cache `source`."""

    __slots__ = ("blocks", "source")

    def __init__(self, source: str, blocks: int) -> None:
        self.source = source
        self.blocks = blocks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixFetch) and self.source == other.source and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash((self.source, self.blocks))

    def __repr__(self) -> str:
        return f"Fetch({self.source!r}, {self.blocks})"


class Route:
    """Instance ids; equal ones mean that the request is not handed off. `moves` are made first.

    A router that knows of caches says how many prompt tokens are expected to be reused, once what it wants to `fetch`
    is there, and one that predicts the time to the first token says that too; it plays no part in whether two routes
    are equal.
    """

    __slots__ = ("decode", "fetch", "moves", "prefill", "reused_tokens", "ttft_s")

    def __init__(
        self,
        prefill: str,
        decode: str,
        moves: tuple[RoleMove, ...] = (),
        reused_tokens: int = 0,
        fetch: PrefixFetch | None = None,
        ttft_s: float | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.moves = moves
        self.reused_tokens = reused_tokens
        self.fetch = fetch
        self.ttft_s = ttft_s

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Route)
            and (self.prefill, self.decode) == (other.prefill, other.decode)
            and self.moves == other.moves
            and self.reused_tokens == other.reused_tokens
            and self.fetch == other.fetch
        )

    def __hash__(self) -> int:
        return hash((self.prefill, self.decode, self.moves))

    def __repr__(self) -> str:
        reuse = f", {self.reused_tokens}, {self.fetch!r}" if self.reused_tokens or self.fetch else ""
        return f"Route({self.prefill!r}, {self.decode!r}, {self.moves!r}{reuse})"


class Placement:
    """Where a request runs and, if it is split, how its KV cache travels."""

    __slots__ = ("mode", "route")

    def __init__(self, route: Route, mode: HandoffMode | None) -> None:
        self.route = route
        self.mode = mode


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
