"""Overload control: reject requests that would miss the SLO (Mooncake, arXiv 2407.00079, section 7).

The prefill load of a request is its predicted TTFT divided by the TTFT bound. The decode load is the predicted time
between tokens (TBT) divided by the TBT bound. A load above 1 means a probable miss of the SLO.
"""

from math import ceil
from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.events import PlacedRequest
from twofold.scheduling.admission.admission import Admission, QueuedRequest
from twofold.scheduling.admission.ledger import OverloadLedger
from twofold.scheduling.admission.limits import AdmissionLimits, Refusal, RefusalReason
from twofold.scheduling.cluster.scheduler import ClusterScheduler


class OverloadRule(msgspec.Struct, frozen=True):
    """Rule for rejecting requests under overload.

    The rule says whether to check the prefill load at arrival, the decode load at arrival, and the decode load
    after prefill.
    """

    help: str
    phases: bool = True  # check the prefill load at arrival, and the decode load after prefill
    decode: bool = False  # check the decode load at arrival too
    coming: bool = False  # at arrival, count requests in prefill as decoding


NO_OVERLOAD_RULE: Final = "none"

OVERLOAD_RULES: Final = {
    NO_OVERLOAD_RULE: OverloadRule("Accepts every request.", phases=False),
    # A rejection before decode wastes the prefill.
    "baseline": OverloadRule("Checks each phase when it begins (section 7.1)."),
    # The decode load has changed by the time the prompt is computed, so the load of the two phases oscillates.
    "early": OverloadRule("Checks both phases at arrival (section 7.2), against the current decode load.", decode=True),
    # The paper also subtracts the requests that will have finished by then. This rule does not: under overload each
    # departure is followed by another arrival, and counting on departures promises the same capacity twice.
    "predicted": OverloadRule(
        "Checks both phases at arrival, against the decode load expected when the prompt is computed (section 7.4).",
        decode=True,
        coming=True,
    ),
}


def create_overload_rule(name: str) -> OverloadRule:
    """Return the overload rule called `name`. Raises ConfigurationError if there is none."""
    if name not in OVERLOAD_RULES:
        raise ConfigurationError(f"unknown overload rule {name!r}: choose one of {', '.join(OVERLOAD_RULES)}")
    return OVERLOAD_RULES[name]


NEVER: Final = 1 << 30  # seconds until a retry of a request that misses the SLO even on an idle cluster
_PRIORITY_STEP, _MAX_STEPS = 0.1, 5


class OverloadControl:
    """Rejects requests by an overload rule, at arrival (`rejection`) and after prefill (`admit_decode`)."""

    def __init__(self, rule: OverloadRule, ledger: OverloadLedger) -> None:
        self.ledger = ledger
        self._rule = rule

    def rejection(self, placed: PlacedRequest, now: float, priority: int = 0) -> RefusalReason | None:
        """Return a reason to reject an arriving request; None to accept it."""
        # `placed` has the route that the request would get.
        rule, ledger, limit = self._rule, self.ledger, _load_limit(priority)
        if not rule.phases:
            return None
        alone, decode_alone = ledger.alone(placed)
        load = ledger.prefill_load(placed, now)
        if load > 1.0 or load - alone > limit:
            return RefusalReason.PREFILL_LOAD if alone <= 1.0 else RefusalReason.BEYOND_SLO
        if not rule.decode:
            return None
        decode_load = ledger.decode_load(placed, coming=rule.coming)
        if decode_load > limit and decode_alone > 1.0:
            return RefusalReason.BEYOND_SLO
        return RefusalReason.DECODE_LOAD if decode_load > max(limit, decode_alone) else None

    def refusal(self, placed: PlacedRequest, reason: RefusalReason, now: float, priority: int = 0) -> Refusal:
        """Return a refusal for `reason`, with the predicted time until a retry succeeds."""
        ledger, limit = self.ledger, _load_limit(priority)
        alone, decode_alone = ledger.alone(placed)
        if reason is RefusalReason.BEYOND_SLO:
            return Refusal(reason, NEVER)
        if reason is RefusalReason.PREFILL_LOAD:
            load = ledger.prefill_load(placed, now)
            wait_s = max(load - 1.0, load - alone - limit) * ledger.ttft_s
        else:
            wait_s = ledger.decode_relief_s(placed, max(limit, decode_alone), now)
        return Refusal(reason, max(1, ceil(wait_s)))

    def admit_decode(self, request_id: str, now: float, *, force: bool = False) -> RefusalReason | None:
        """Record that a request starts to decode, or return a reason to reject it. `force` skips the check."""
        # Called after the `first_token` event. A rejected request stays in the ledger until its `aborted` event.
        placed = self.ledger.get(request_id)
        if placed is None or placed.request.output_tokens <= 1:
            return None
        if not force and self._rule.phases and self.ledger.decode_load(placed) > 1.0:
            return RefusalReason.DECODE_LOAD
        self.ledger.start_decode(placed, now)
        return None


def _load_limit(priority: int) -> float:
    # Less urgent requests (priority above 0) have a lower limit, to keep capacity for urgent requests.
    return 1.0 - _PRIORITY_STEP * min(max(priority, 0), _MAX_STEPS)


class OverloadAdmission(Admission):
    """Admission control that enforces admission limits, and rejects requests when the cluster is overloaded."""

    def __init__(self, limits: AdmissionLimits, cluster: ClusterScheduler, control: OverloadControl) -> None:
        super().__init__(limits)
        # The router must be stateless, because arriving requests are routed twice.
        self._cluster, self._control = cluster, control

    def judge(self, queued: QueuedRequest, now: float) -> Refusal | None:
        placed = self._cluster.would_place(queued.request, now)
        if placed is None:  # cannot be placed now: queued without a check
            return None
        reason = self._control.rejection(placed, now, queued.priority)
        return None if reason is None else self._control.refusal(placed, reason, now, queued.priority)
