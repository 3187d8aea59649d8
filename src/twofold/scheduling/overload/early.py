"""Early rejection: both phases are looked at when the request arrives (Mooncake, section 7.2)."""

from twofold.scheduling.overload.baseline import Baseline
from twofold.scheduling.overload.ledger import Ledger, Newcomer


class Early(Baseline):
    """Sees the decode load as it is now, and not as it will be when the prompt is computed: the two phases then fill
    and empty in turn."""

    def decode_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        return ledger.decode_load(newcomer, now)
