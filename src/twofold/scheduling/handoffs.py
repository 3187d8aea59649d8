"""The hand-off seam: how is the KV cache of a request to be sent?"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from mypy_extensions import mypyc_attr

from twofold.handoff import HandoffMode
from twofold.request import Request
from twofold.scheduling.router import Route

# The prompt length, in tokens, from which sending layer by layer leaves less of the transfer visible than sending all
# at the end, on a given prefill instance.
Crossover = Callable[[str], int]


@mypyc_attr(allow_interpreted_subclasses=True)
class HandoffPolicy(ABC):
    """Picks the mode of each hand-off."""

    @abstractmethod
    def choose(self, request: Request, route: Route) -> HandoffMode: ...


class FixedHandoff(HandoffPolicy):
    """The same mode for every request."""

    def __init__(self, mode: HandoffMode) -> None:
        self.mode = mode

    def choose(self, request: Request, route: Route) -> HandoffMode:
        return self.mode


class BySize(HandoffPolicy):
    """Splitwise section 4.3: short prompts serialized, because each layer sent costs a little; long ones by layer."""

    def __init__(self, crossover: Crossover) -> None:
        self.crossover = crossover

    def choose(self, request: Request, route: Route) -> HandoffMode:
        serialized = request.prompt_tokens < self.crossover(route.prefill)
        return HandoffMode.SERIALIZED if serialized else HandoffMode.LAYER_WISE


# Each takes the crossover, which follows from the model and the link.
HANDOFF_POLICIES: dict[str, Callable[[Crossover], HandoffPolicy]] = {
    "serialized": lambda _: FixedHandoff(HandoffMode.SERIALIZED),
    "layer-wise": lambda _: FixedHandoff(HandoffMode.LAYER_WISE),
    "pull": lambda _: FixedHandoff(HandoffMode.PULL),
    "by-size": BySize,
}
