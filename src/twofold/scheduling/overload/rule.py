"""The overload seam: which load does a request look at before it is computed, and which before it is decoded?

Load is what the next request would find, over the bound that its SLO sets: above 1 it would be served too late, and is
refused (Mooncake, section 7). Of prefill it is the predicted TTFT, of decode the predicted time between tokens.
"""

from abc import ABC, abstractmethod

from twofold.scheduling.overload.ledger import Ledger, Newcomer


class Overload(ABC):
    """Loads as a rule sees them; 0 where it does not look. It changes nothing."""

    @abstractmethod
    def prefill_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        """At arrival: of the instance that would prefill it."""
        ...

    @abstractmethod
    def decode_load(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        """At arrival: of where it would be decoded."""
        ...

    def load_after_prefill(self, newcomer: Newcomer, ledger: Ledger, now: float) -> float:
        """With the prompt computed: of the instance that is to decode it, which has the last word."""
        return ledger.decode_load(newcomer, now)
