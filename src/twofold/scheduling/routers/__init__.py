"""Registry of routers: constructor and help text by name."""

from collections.abc import Callable

from twofold.scheduling.cluster.pools import pending_tokens, requests
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.routers.appending import AppendPrefill
from twofold.scheduling.routers.cells import CellRouter
from twofold.scheduling.routers.draws import TwoChoices, at_random, round_robin
from twofold.scheduling.routers.forecasting import Conductor, ShortestPredictedQueue
from twofold.scheduling.routers.jsq import JoinShortestQueue, PlannedRoles
from twofold.scheduling.routers.sessions import SessionAffinity
from twofold.scheduling.routers.splitwise import SplitwiseRouter, SplitwiseSimRouter


class RegisteredRouter:
    """Registry entry of a router: a constructor with a one-line help text."""

    def __init__(self, create: Callable[[], Router], help_text: str) -> None:
        self.create, self.help = create, help_text
        self.kind = type(create())

    def __call__(self) -> Router:
        return self.create()


ROUTERS: dict[str, RegisteredRouter] = {
    "jsq": RegisteredRouter(JoinShortestQueue, "fewest pending tokens, least reserved memory"),
    "jsq-pending": RegisteredRouter(
        lambda: JoinShortestQueue(pending_tokens, pending_tokens), "fewest pending tokens for both phases"
    ),
    "jsq-requests": RegisteredRouter(lambda: JoinShortestQueue(requests, requests), "fewest requests for both phases"),
    "round-robin": RegisteredRouter(round_robin, "each instance in turn"),
    "random": RegisteredRouter(at_random, "any instance, the same ones in every run"),
    "two-choices": RegisteredRouter(TwoChoices, "the less loaded of two random instances"),
    "session": RegisteredRouter(SessionAffinity, "jsq that keeps the turns of a session together"),
    "cells:jsq": RegisteredRouter(lambda: CellRouter(JoinShortestQueue()), "a cell by two choices, jsq within it"),
    "jsq-planned": RegisteredRouter(PlannedRoles, "jsq with roles that re-planning may change"),
    "load": RegisteredRouter(ShortestPredictedQueue, "shortest predicted prefill queue"),
    "local-prefix": RegisteredRouter(lambda: Conductor(fetches=False), "least predicted TTFT, no fetches"),
    "conductor": RegisteredRouter(Conductor, "least predicted TTFT, fetches cached prefixes (Mooncake)"),
    "append": RegisteredRouter(
        AppendPrefill, "conductor that prefills on decode instances with most of the prompt cached"
    ),
    "splitwise": RegisteredRouter(SplitwiseRouter, "three pools with a mixed pool that adapts (Splitwise)"),
    "splitwise-sim": RegisteredRouter(SplitwiseSimRouter, "as splitwise, with SplitwiseSim's idle rule"),
}

FIXED_ROLE_ROUTERS = tuple(name for name, router in ROUTERS.items() if router.kind.fixed_roles)
APPENDING_ROUTERS = tuple(name for name, router in ROUTERS.items() if router.kind.appends)
CELL_ROUTERS = tuple(name for name, router in ROUTERS.items() if router.kind.uses_cells)
FORECASTING_ROUTERS = tuple(name for name, router in ROUTERS.items() if router.kind.needs_forecast)
LIVE_ROUTERS = tuple(name for name, router in ROUTERS.items() if not router.kind.needs_idle_events)
