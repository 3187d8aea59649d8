"""The hand-off seam: how is the KV cache of a request to be sent?"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from mypy_extensions import mypyc_attr

from twofold.handoff import HandoffMode
from twofold.performance.transfer import TransferModel
from twofold.placement import Route
from twofold.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class TransferPaths(ABC):
    """What is known of the ways between instances, and of how fast they prefill."""

    @abstractmethod
    def crossover(self, prefill: str) -> int:
        """The prompt length, in tokens, from which sending layer by layer leaves less of the transfer visible than
        sending all at the end, from this instance."""
        ...

    @abstractmethod
    def transfer(self, prefill: str, decode: str) -> TransferModel | None:
        """The way from one instance to another; None where it is not known."""
        ...

    @abstractmethod
    def prefill_s(self, prefill: str, tokens: int) -> float:
        """Seconds of a prefill on this instance."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class HandoffPolicy(ABC):
    """Picks the mode of each hand-off."""

    @abstractmethod
    def choose(self, request: Request, route: Route) -> HandoffMode: ...

    def ended(self, request_id: str) -> None:  # noqa: B027  (most have no accounts to keep)
        """The hand-off of a request is done, or will not be done; said once or more often."""


class FixedHandoff(HandoffPolicy):
    """The same mode for every request."""

    def __init__(self, mode: HandoffMode) -> None:
        self.mode = mode

    def choose(self, request: Request, route: Route) -> HandoffMode:
        return self.mode


class BySizeHandoff(HandoffPolicy):
    """Splitwise section 4.3: short prompts serialized, because each layer sent costs a little; long ones by layer."""

    def __init__(self, paths: TransferPaths) -> None:
        self.paths = paths

    def choose(self, request: Request, route: Route) -> HandoffMode:
        serialized = request.prompt_tokens < self.paths.crossover(route.prefill)
        return HandoffMode.SERIALIZED if serialized else HandoffMode.LAYER_WISE


class AutoHandoff(HandoffPolicy):
    """What leaves the least to wait for after the first token, as the path is now.

    `outstanding` counts the bytes on their way, or promised, to each decode instance: they go first. Where the path
    is not known, layer by layer: that is never worse than all at once by more than the overhead of its layers.
    """

    def __init__(self, paths: TransferPaths) -> None:
        self.paths = paths
        self.outstanding: dict[str, int] = {}
        self._sending: dict[str, tuple[str, int]] = {}

    def choose(self, request: Request, route: Route) -> HandoffMode:
        transfer = self.paths.transfer(route.prefill, route.decode)
        if transfer is None:
            return HandoffMode.LAYER_WISE
        tokens, before = request.prompt_tokens, self.outstanding.get(route.decode, 0)
        self._note(request.id, route.decode, tokens * transfer.kv_bytes_per_token)
        queued_s, prefill_s = before / transfer.bytes_per_s, self.paths.prefill_s(route.prefill, tokens)
        first_layer_s = prefill_s / transfer.layers
        by_layer_s = transfer.layer_wise_s(tokens, prefill_s, max(0.0, queued_s - first_layer_s))
        at_once_s = transfer.serialized_s(tokens, max(0.0, queued_s - prefill_s))
        return HandoffMode.LAYER_WISE if by_layer_s <= at_once_s else HandoffMode.SERIALIZED

    def ended(self, request_id: str) -> None:
        decode, size = self._sending.pop(request_id, ("", 0))
        if size:
            self.outstanding[decode] -= size
            if not self.outstanding[decode]:
                del self.outstanding[decode]

    def _note(self, request_id: str, decode: str, size: int) -> None:
        self.outstanding[decode] = self.outstanding.get(decode, 0) + size
        self._sending[request_id] = (decode, size)


HANDOFF_POLICIES: dict[str, Callable[[TransferPaths], HandoffPolicy]] = {
    "serialized": lambda _: FixedHandoff(HandoffMode.SERIALIZED),
    "layer-wise": lambda _: FixedHandoff(HandoffMode.LAYER_WISE),
    "pull": lambda _: FixedHandoff(HandoffMode.PULL),
    "by-size": BySizeHandoff,
    "auto": AutoHandoff,
}
