"""Everybody is served, however late."""

from twofold.scheduling.overload.ledger import Ledger, Newcomer
from twofold.scheduling.overload.rule import Overload


class Never(Overload):
    """Looks at nothing."""

    def prefill_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        return 0.0

    def decode_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        return 0.0

    def load_after_prefill(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        return 0.0
