"""The hand-off seam: how is the KV cache of a request to be sent?"""

from collections.abc import Callable
from typing import Protocol

from twofold.handoff import HandoffMode
from twofold.request import Request
from twofold.scheduling.router import Route


class HandoffPolicy(Protocol):
    """Picks the mode of each hand-off."""

    def choose(self, request: Request, route: Route) -> HandoffMode: ...


class FixedHandoff:
    """The same mode for every request."""

    def __init__(self, mode: HandoffMode) -> None:
        self.mode = mode

    def choose(self, request: Request, route: Route) -> HandoffMode:
        return self.mode


HANDOFF_POLICIES: dict[str, Callable[[], HandoffPolicy]] = {
    mode.value: lambda mode=mode: FixedHandoff(mode)  # type: ignore[misc]  # mypy cannot see the default's type
    for mode in HandoffMode
}
