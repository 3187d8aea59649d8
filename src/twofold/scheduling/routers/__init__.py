"""Routers by name: one file and one line each."""

from collections.abc import Callable

from twofold.scheduling.router import Router
from twofold.scheduling.routers.jsq import JoinShortestQueue
from twofold.scheduling.routers.round_robin import RoundRobin

ROUTERS: dict[str, Callable[[], Router]] = {
    "jsq": JoinShortestQueue,
    "round-robin": RoundRobin,
}
