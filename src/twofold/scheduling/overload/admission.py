"""Overload control at the door of a live service."""

from twofold.scheduling.admission import Admission
from twofold.scheduling.admission_limits import AdmissionLimits, Refusal
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.overload.control import OverloadControl
from twofold.scheduling.overload.ledger import Newcomer
from twofold.scheduling.waiting_line import Ticket


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
        newcomer = Newcomer.of(ticket.request, route)
        reason = self._control.arrival(newcomer, now, ticket.priority)
        return None if reason is None else self._control.refusal(newcomer, reason, now, ticket.priority)
