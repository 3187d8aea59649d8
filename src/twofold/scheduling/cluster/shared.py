"""A cluster as one of several controllers sees it: what others place there it knows from reports only.

With one controller nothing has to be reported: it placed all that there is. With several, instances say now and then
what they have, and what of it is whose. Such a report is old when it comes, and gets older until the next one; what
a controller placed itself it knows as it is now, and counts in the place of what the report says of that.
"""

from enum import StrEnum

from twofold.request import Request
from twofold.scheduling.cluster.handoff_policy import HandoffPolicy
from twofold.scheduling.cluster.pools import NO_LOAD, LoadTotals, load_totals, replace_totals
from twofold.scheduling.cluster.router import Placement, Router
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.kv_reservation import FULL_RESERVATION, KvReservation


class OwnLoad(StrEnum):
    """What a controller knows of its own requests besides reports."""

    FOLLOWED = "followed"  # from when they are placed until they end: of its own it knows all, at any time
    SENT = "sent"  # that it placed them since the last report: their ends it hears of by reports
    IGNORED = "ignored"  # nothing: a router without memory, which goes by reports alone


class LoadReport:
    """What there is on an instance, or in a cell, `total`; `yours` is the part of whom the report is for.

    Both are of the same moment. Where a controller does not follow its requests, `yours` is all that it ever sent.
    """

    __slots__ = ("instance", "total", "yours")

    def __init__(self, instance: str, total: LoadTotals, yours: LoadTotals) -> None:
        self.instance = instance
        self.total = total
        self.yours = yours


class SharedCluster(ClusterScheduler):
    """The accounts of one of several controllers: what it placed, and what reports say that others did.

    An instance counts for what the last report says, less what is this controller's in it, plus what that is now.
    `FOLLOWED`, and alone, this is a `ClusterScheduler`, whatever is reported and when.
    """

    def __init__(
        self,
        router: Router,
        handoffs: HandoffPolicy,
        memory: KvReservation = FULL_RESERVATION,
        own: OwnLoad = OwnLoad.FOLLOWED,
    ) -> None:
        super().__init__(router, handoffs, memory)
        self._own = own
        self._others: dict[str, LoadTotals] = {}

    def own(self, instance_id: str) -> LoadTotals:
        """What is counted on an instance as this controller's: its part of the next report."""
        load = self.pools.get(instance_id)
        if load is None:
            return NO_LOAD
        return load_totals(load).less(self._others.get(instance_id, NO_LOAD))

    def reported(self, report: LoadReport) -> None:
        """A report has come; one about an instance that is not there means nothing."""
        load = self.pools.get(report.instance)
        if load is None:
            return
        others = report.total.less(report.yours)
        replace_totals(load, self._others.get(report.instance, NO_LOAD), others)
        self._others[report.instance] = others
        if load.place:
            self.pools.changed(load)

    def remove_instance(self, instance_id: str) -> list[str]:
        self._others.pop(instance_id, None)
        return super().remove_instance(instance_id)

    def arrive(self, request: Request, now: float) -> Placement | None:
        placement = super().arrive(request, now)
        if self._own is OwnLoad.IGNORED:
            super().ended(request.id)
        return placement

    def prefilled(self, request_id: str, now: float | None = None) -> None:
        if self._own is not OwnLoad.SENT:
            super().prefilled(request_id, now)

    def handed_off(self, request_id: str) -> None:
        if self._own is not OwnLoad.SENT:
            super().handed_off(request_id)

    def ended(self, request_id: str) -> None:
        if self._own is OwnLoad.SENT:
            self.forget(request_id)
        else:
            super().ended(request_id)
