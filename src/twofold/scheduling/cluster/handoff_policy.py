"""Hand-off policies: in which mode is a KV cache transferred?"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from mypy_extensions import mypyc_attr

from twofold.handoff import HandoffMode
from twofold.performance.transfer import TransferModel
from twofold.placement import Route
from twofold.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class TransferPaths(ABC):
    """Transfer and prefill speeds of the instances."""

    @abstractmethod
    def crossover(self, prefill: str) -> int:
        """The prompt length in tokens from which layer-wise beats serialized transfer."""
        ...

    @abstractmethod
    def transfer(self, prefill: str, decode: str) -> TransferModel | None:
        """The transfer model between two instances; None if unknown."""
        ...

    @abstractmethod
    def prefill_s(self, prefill: str, tokens: int) -> float:
        """Seconds of the prefill of `tokens` tokens on an instance."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class HandoffPolicy(ABC):
    """Chooses the mode of each hand-off."""

    @abstractmethod
    def choose(self, request: Request, route: Route) -> HandoffMode: ...

    def ended(self, request_id: str) -> None:  # noqa: B027  (most have no accounts to keep)
        """A hand-off completed or was cancelled; may be called more than once."""


class FixedHandoff(HandoffPolicy):
    """Uses one mode for every request."""

    def __init__(self, mode: HandoffMode) -> None:
        self.mode = mode

    def choose(self, request: Request, route: Route) -> HandoffMode:
        return self.mode


class BySizeHandoff(HandoffPolicy):
    """Serialized transfer for short prompts and layer-wise transfer for long ones, which amortize the cost per layer
    (Splitwise section 4.3).
    """

    def __init__(self, paths: TransferPaths) -> None:
        self.paths = paths

    def choose(self, request: Request, route: Route) -> HandoffMode:
        serialized = request.prompt_tokens < self.paths.crossover(route.prefill)
        return HandoffMode.SERIALIZED if serialized else HandoffMode.LAYER_WISE


class AutoHandoff(HandoffPolicy):
    """The mode with the shortest predicted visible transfer.

    `outstanding` counts the bytes promised to each decode instance, which are transferred first. Unknown paths use
    layer-wise transfer, which costs at most the overhead of its layers over serialized transfer.
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
