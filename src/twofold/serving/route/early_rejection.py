"""Early rejection: who would wait too long for a first token is told so at once (Mooncake section 7.2)."""

from math import ceil

from twofold.scheduling.admission import Admission
from twofold.scheduling.admission_limits import AdmissionLimits, Refusal, RefusalReason
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.waiting_line import Ticket


class EarlyRejection(Admission):
    """Refuses a request whose first token is predicted later than `ttft_s` seconds after it is placed.

    The router predicts, so it must be one that does (`FORECASTING_ROUTERS`). Of decodes nothing is predicted: nobody
    knows how fast the servers of somebody else decode how many together.
    """

    def __init__(self, limits: AdmissionLimits, cluster: ClusterScheduler, ttft_s: float) -> None:
        super().__init__(limits)
        self._cluster, self._ttft_s = cluster, ttft_s

    def judge(self, ticket: Ticket, now: float) -> Refusal | None:
        route = self._cluster.would_place(ticket.request, now)
        if route is None or route.ttft_s is None or route.ttft_s <= self._ttft_s:
            return None
        return Refusal(RefusalReason.PREFILL_LOAD, max(1, ceil(route.ttft_s - self._ttft_s)))
