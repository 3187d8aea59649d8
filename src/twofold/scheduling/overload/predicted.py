"""Early rejection by prediction: decode as it will be when the prompt is computed (Mooncake, section 7.4)."""

from twofold.scheduling.overload.baseline import Baseline
from twofold.scheduling.overload.ledger import Ledger, Newcomer


class Predicted(Baseline):
    """Whoever was taken before and is still being prefilled has a place in decode already.

    The paper also lets those go who will have ended by then. Here nobody is expected to leave without another in its
    place: refusals are about times in which more come than can be served. To count on departures promises the same
    place twice, most often to long prompts, which are computed in vain when others were quicker.
    """

    def decode_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        return ledger.coming_decode_load(newcomer, now)
