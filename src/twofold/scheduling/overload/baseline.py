"""Each phase is looked at when it begins: Mooncake's baseline (section 7.1)."""

from twofold.scheduling.overload.ledger import Ledger, Newcomer
from twofold.scheduling.overload.rule import Overload


class Baseline(Overload):
    """A request that decode then has no place for was prefilled for nothing."""

    def prefill_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        return ledger.prefill_load(newcomer, now)

    def decode_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        return 0.0
