"""The overload seam: which load does a request look at before it is computed, and which before it is decoded?

Load is what the next request would find, over the bound that its SLO sets: above 1 it would be served too late, and is
refused (Mooncake, section 7). Of prefill it is the predicted TTFT, of decode the predicted time between tokens.

Everybody is served, however late.

Each phase is looked at when it begins: Mooncake's baseline (section 7.1).

Early rejection: both phases are looked at when the request arrives (Mooncake, section 7.2).

Early rejection by prediction: decode as it will be when the prompt is computed (Mooncake, section 7.4).

Who is refused, and until when: a rule, the ledger that it looks at, and how urgent requests are.

Overload control at the door of a live service.
"""

from abc import ABC, abstractmethod
from math import ceil
from typing import Final

from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.ledger import OverloadLedger, PlacedRequest
from twofold.scheduling.admission.limits import AdmissionLimits, Refusal, RefusalReason
from twofold.scheduling.admission.queue import Ticket
from twofold.scheduling.cluster.scheduler import ClusterScheduler


class OverloadRule(ABC):
    """Loads as a rule sees them; 0 where it does not look. It changes nothing."""

    @abstractmethod
    def prefill_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        """At arrival: of the instance that would prefill it."""
        ...

    @abstractmethod
    def decode_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        """At arrival: of where it would be decoded."""
        ...

    def load_after_prefill(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        """With the prompt computed: of the instance that is to decode it, which has the last word."""
        return ledger.decode_load(newcomer, now)


class NeverReject(OverloadRule):
    """Looks at nothing."""

    def prefill_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        return 0.0

    def decode_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        return 0.0

    def load_after_prefill(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        return 0.0


class BaselineRejection(OverloadRule):
    """A request that decode then has no place for was prefilled for nothing."""

    def prefill_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        return ledger.prefill_load(newcomer, now)

    def decode_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        return 0.0


class EarlyRejection(BaselineRejection):
    """Sees the decode load as it is now, and not as it will be when the prompt is computed: the two phases then fill
    and empty in turn."""

    def decode_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        return ledger.decode_load(newcomer, now)


class PredictedRejection(BaselineRejection):
    """Whoever was taken before and is still being prefilled has a place in decode already.

    The paper also lets those go who will have ended by then. Here nobody is expected to leave without another in its
    place: refusals are about times in which more come than can be served. To count on departures promises the same
    place twice, most often to long prompts, which are computed in vain when others were quicker.
    """

    def decode_load(self, newcomer: PlacedRequest, ledger: OverloadLedger, now: float) -> float:
        return ledger.coming_decode_load(newcomer, now)


NEVER: Final = 1 << 30  # seconds: a request that would come too late at any time
_STEP, _STEPS = 0.1, 5  # how much of the bound each step of priority leaves to those before, and how often


class OverloadControl:
    """A driver asks at `arrival`, says what was `placed`, asks again when a prompt is `prefilled`, says what `ended`.

    A request is refused whose load is above 1 (see `OverloadRule`). Of less urgent ones, whose priority is
    above 0, each
    step of priority lowers that by a tenth, to a half at most: their wait, and the decodes beside them, leave room for
    others.
    """

    def __init__(self, rule: OverloadRule, ledger: OverloadLedger) -> None:
        self.ledger = ledger
        self._rule = rule

    def arrival(self, newcomer: PlacedRequest, now: float, priority: int = 0) -> RefusalReason | None:
        """Why a request is not taken; None if it is."""
        most = _most(priority)
        alone, decode_alone = self.ledger.alone(newcomer)
        load = self._rule.prefill_load(newcomer, self.ledger, now)
        if load > 1.0 or load - alone > most:
            return RefusalReason.PREFILL_LOAD if alone <= 1.0 else RefusalReason.BEYOND_SLO
        decode_load = self._rule.decode_load(newcomer, self.ledger, now)
        if decode_load > most and decode_alone > 1.0:
            return RefusalReason.BEYOND_SLO
        return RefusalReason.DECODE_LOAD if decode_load > max(most, decode_alone) else None

    def refusal(
        self, newcomer: PlacedRequest, reason: RefusalReason, now: float, priority: int = 0
    ) -> Refusal:
        """The reason, and after how many seconds the load would be low enough if nobody else came."""
        ledger, most = self.ledger, _most(priority)
        alone, decode_alone = ledger.alone(newcomer)
        if reason is RefusalReason.BEYOND_SLO:
            return Refusal(reason, NEVER)
        if reason is RefusalReason.PREFILL_LOAD:
            load = ledger.prefill_load(newcomer, now)
            wait_s = max(load - 1.0, load - alone - most) * ledger.ttft_s
        else:
            wait_s = ledger.decode_relief_s(newcomer, max(most, decode_alone), now)
        return Refusal(reason, max(1, ceil(wait_s)))

    def placed(self, newcomer: PlacedRequest, now: float) -> float:
        """A request is on its way to its prefill instance; returns its predicted TTFT."""
        return self.ledger.placed(newcomer, now)

    def prefilled(self, request_id: str, now: float, *, sure: bool = False) -> RefusalReason | None:
        """A prompt is computed: why its decode instance does not take it; None if it does, as it must if it is `sure`.

        One that is refused is still to be said to have ended.
        """
        newcomer = self.ledger.prefilled(request_id, now)
        if newcomer is None or not newcomer.decodes:
            return None
        if not sure and self._rule.load_after_prefill(newcomer, self.ledger, now) > 1.0:
            return RefusalReason.DECODE_LOAD
        self.ledger.decodes(newcomer, now)
        return None

    def ended(self, request_id: str, now: float, output_tokens: int | None = None) -> None:
        """A request is over; `output_tokens` if it is complete. One that was not placed is none of our business."""
        self.ledger.ended(request_id, now, output_tokens)


def _most(priority: int) -> float:
    return 1.0 - _STEP * min(max(priority, 0), _STEPS)


class OverloadAdmission(Admission):
    """Asks `control` about a request where the cluster would place it now, by a router that only looks at loads.

    One that nobody can take just now is not judged: it waits, as ever, until somebody can or its deadline passes.
    """

    def __init__(self, limits: AdmissionLimits, cluster: ClusterScheduler, control: OverloadControl) -> None:
        super().__init__(limits)
        self._cluster, self._control = cluster, control

    def judge(self, ticket: Ticket, now: float) -> Refusal | None:
        route = self._cluster.would_place(ticket.request, now)
        if route is None:
            return None
        newcomer = PlacedRequest.of(ticket.request, route)
        reason = self._control.arrival(newcomer, now, ticket.priority)
        return None if reason is None else self._control.refusal(newcomer, reason, now, ticket.priority)
