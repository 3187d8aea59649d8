"""Routers by name: one file and one line each."""

from collections.abc import Callable

from twofold.scheduling.cluster.router import FixedRoles, Router
from twofold.scheduling.routers.cells import CellRouter
from twofold.scheduling.routers.conductor import Conductor
from twofold.scheduling.routers.forecasting import ForecastingRouter, ShortestPredictedQueue
from twofold.scheduling.routers.in_turn import at_random, round_robin
from twofold.scheduling.routers.jsq import PlannedRoles, by_pending_tokens, by_requests, by_tokens
from twofold.scheduling.routers.splitwise import SplitwiseRouter
from twofold.scheduling.routers.two_choices import TwoChoices

ROUTERS: dict[str, Callable[[], Router]] = {
    "jsq": by_tokens,
    "jsq-pending": by_pending_tokens,
    "jsq-requests": by_requests,
    "round-robin": round_robin,
    "random": at_random,
    "two-choices": TwoChoices,
    "cells:jsq": lambda: CellRouter(by_tokens()),
    "jsq-planned": PlannedRoles,
    "load": ShortestPredictedQueue,
    "local-prefix": lambda: Conductor(threshold=None),
    "conductor": Conductor,
    "splitwise": SplitwiseRouter,
    "splitwise-sim": lambda: SplitwiseRouter(returns_when_idle=True),
}

# Those that never ask an instance for a phase it was not started for.
FIXED_ROLE_ROUTERS = tuple(name for name, router in ROUTERS.items() if isinstance(router(), FixedRoles))

# Those that divide instances into cells.
CELL_ROUTERS = tuple(name for name, router in ROUTERS.items() if isinstance(router(), CellRouter))

# Those that go by predictions, which somebody has to give them (`Pools.forecast`).
FORECASTING_ROUTERS = tuple(
    name for name, router in ROUTERS.items() if isinstance(router(), ForecastingRouter)
)

# Those that a live service can run: it does not say when an instance is idle, which `splitwise-sim` waits for.
LIVE_ROUTERS = (*FIXED_ROLE_ROUTERS, "jsq-planned", "splitwise")
