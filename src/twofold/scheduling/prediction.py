"""What is expected of one instance: how long its prefills take, and transfers to it.

A simulation knows from the performance model, and a live service from a profile of its host or from what its workers
measured: routers do not ask which.
"""

from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.performance.base import PerformanceModel
from twofold.performance.layer_wise import layer_wise
from twofold.performance.transfer import TransferModel

_MANY: Final = 1 << 14  # prefills whose times are kept


@mypyc_attr(allow_interpreted_subclasses=True)
class Prediction(ABC):
    """Seconds of the work of one instance, or of all instances of a kind."""

    @abstractmethod
    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        """Of the prefill of a prompt of `tokens` tokens that runs alone, the KV of the first `reused` of which is in
        the cache beside the instance and only loaded."""
        ...

    @abstractmethod
    def transfer_s(self, tokens: int) -> float:
        """Until KV of so many tokens is here from the cache of another instance, with nobody else on the way; infinite
        where it cannot come here."""
        ...


class Modelled(Prediction):
    """The times of a performance model; `load_token_s` is what KV of a token takes from the cache to the instance."""

    def __init__(self, model: PerformanceModel, transfer: TransferModel, load_token_s: float) -> None:
        self._model = model
        self._transfer = transfer
        self._load_token_s = load_token_s
        self._prefills: dict[tuple[int, int], float] = {}

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        known = self._prefills.get((tokens, reused))
        if known is None:
            if len(self._prefills) >= _MANY:
                self._prefills.clear()
            known = self._prefills[tokens, reused] = self._prefill_s(tokens, reused)
        return known

    def _prefill_s(self, tokens: int, reused: int) -> float:
        compute_s = self._model.prefill_s(tokens - reused, tokens * tokens - reused * reused)
        if not reused:
            return compute_s
        return layer_wise(self._transfer.layers, reused * self._load_token_s, compute_s)

    def transfer_s(self, tokens: int) -> float:
        return self._transfer.serialized_s(tokens) if tokens else 0.0
