"""Interface of routers, which choose the prefill and the decode instance of a request."""

from abc import ABC, abstractmethod
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.events import Route
from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools


@mypyc_attr(allow_interpreted_subclasses=True)
class Router(ABC):
    """Chooses the prefill and the decode instance of each request by the loads of the instances."""

    # Requirements of the router on the simulator or service.
    fixed_roles: ClassVar[bool] = True  # instances run only the phases they were started for
    needs_forecast: ClassVar[bool] = False  # `Pools.forecast` must be set
    appends: ClassVar[bool] = False  # decode instances may prefill, so their batcher must
    uses_cells: ClassVar[bool] = False  # instances are grouped into cells
    reads_prefix_caches: ClassVar[bool] = False  # `Pools.forecast` must index the cached prefixes
    repeats_routes: ClassVar[bool] = True  # a request routed twice, with equal loads, gets the same route
    needs_idle_events: ClassVar[bool] = False  # `ClusterScheduler.idle` must be called; live services do not

    @abstractmethod
    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        """Return the route of a request that needs `tokens` KV tokens; None if it cannot be routed now."""

    def new_pools(self) -> Pools:
        """Create empty pools of the class that this router requires."""
        return Pools()

    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        """Return the role that an instance away from its original role should take now.

        The base class returns the current role; subclasses can return the original role.
        """
        return load.role  # `idle`: the instance has no work left
