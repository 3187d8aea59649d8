"""What hand-off policies may know of a simulated cluster: the performance model's own figures."""

from collections.abc import Callable
from typing import NamedTuple

from twofold.performance.transfer import TransferModel
from twofold.scheduling.handoffs import Paths

NEVER = 1 << 62  # where a machine has no crossover: synchronisation costs more than any prefill hides


class Outlet(NamedTuple):
    """Of an instance: its way out, how long it prefills, and from which prompt length it sends layer by layer."""

    transfer: TransferModel
    prefill_s: Callable[[int], float]
    crossover: int

    @classmethod
    def of(cls, transfer: TransferModel, prefill_s: Callable[[int], float]) -> "Outlet":
        crossover = transfer.crossover_tokens(prefill_s)
        return cls(transfer, prefill_s, NEVER if crossover is None else crossover)


class ModelledPaths(Paths):
    """By instance; the slower end of a path is not looked at, as in `TransferModel`."""

    def __init__(self, outlets: dict[str, Outlet]) -> None:
        self.outlets = outlets

    def crossover(self, prefill: str) -> int:
        return self.outlets[prefill].crossover

    def transfer(self, prefill: str, decode: str) -> TransferModel | None:  # noqa: ARG002  (that end is not looked at)
        return self.outlets[prefill].transfer

    def prefill_s(self, prefill: str, tokens: int) -> float:
        return self.outlets[prefill].prefill_s(tokens)
