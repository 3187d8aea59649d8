"""Cluster scheduler for several controllers that share the instances.

A controller estimates the load of an instance as the reported load from other controllers' requests plus the
current load from the controller's own requests.
"""

from enum import StrEnum

from twofold.events import PlacedRequest
from twofold.instance import NO_LOAD, LoadTotals
from twofold.request import Request
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.cluster.scheduler import ClusterScheduler, HandoffPolicy
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation


class OwnLoad(StrEnum):
    """Rule for how a controller tracks the load of an instance between two load reports of the instance.

    Possible rules: count all unfinished requests of the controller, count only the requests placed since the
    last report, or count no requests.
    """

    FOLLOWED = "followed"  # all requests, from placement to end
    SENT = "sent"  # requests placed since the last report; their ends only appear in reports
    IGNORED = "ignored"  # nothing: the controller keeps no state and routes by reports alone


class LoadReport:
    """Report of the load of an instance or cell (group of instances), sent to one of several controllers.
    A report has the total load, and the load from requests of the receiving controller.
    """

    def __init__(self, instance: str, total: LoadTotals, yours: LoadTotals) -> None:
        self.instance = instance
        self.total = total
        self.yours = yours  # under `OwnLoad.SENT`, includes every request ever placed, even after its end


class SharedCluster(ClusterScheduler):
    """Cluster scheduler for a controller that shares instances with other controllers."""

    def __init__(
        self,
        router: Router,
        handoffs: HandoffPolicy,
        reservation: KvReservation = FULL_RESERVATION,
        own: OwnLoad = OwnLoad.FOLLOWED,
    ) -> None:
        super().__init__(router, handoffs, reservation)
        self._own = own
        self._others: dict[str, LoadTotals] = {}

    def own(self, instance_id: str) -> LoadTotals:
        """Return the load that this controller's requests add to an instance."""
        load = self.pools.get(instance_id)
        return NO_LOAD if load is None else load.less(self._others.get(instance_id, NO_LOAD))

    def reported(self, report: LoadReport) -> None:
        """Update the load that other controllers' requests add to an instance."""
        load = self.pools.get(report.instance)
        if load is None:
            return
        # The load of an instance is the total of its latest report, minus `yours`, plus the current own load. For a
        # single controller with `OwnLoad.FOLLOWED`, reports change no load.
        others = report.total.less(report.yours)
        load.replace(self._others.get(report.instance, NO_LOAD), others)
        self._others[report.instance] = others
        if load.place:
            self.pools.changed(load)

    def remove_instance(self, instance_id: str) -> list[str]:
        self._others.pop(instance_id, None)
        return super().remove_instance(instance_id)

    def place(self, request: Request, now: float) -> PlacedRequest | None:
        placed = super().place(request, now)
        if self._own is OwnLoad.IGNORED:
            super().withdraw(request.id)
        return placed

    def first_token(self, request_id: str, now: float) -> None:
        if self._own is not OwnLoad.SENT:
            super().first_token(request_id, now)

    def handed_off(self, request_id: str, started: float, now: float) -> None:
        if self._own is not OwnLoad.SENT:
            super().handed_off(request_id, started, now)

    def withdraw(self, request_id: str) -> None:
        if self._own is OwnLoad.SENT:
            self.forget(request_id)
        else:
            super().withdraw(request_id)
