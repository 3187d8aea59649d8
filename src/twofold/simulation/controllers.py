"""Simulation of several controllers of one cluster. Each places requests by load reports that arrive with a delay."""

from collections.abc import Callable

from twofold.cluster.spec import ControlSpec
from twofold.cluster.timing import ps
from twofold.events import PlacedRequest, Route
from twofold.handoff import HandoffMode
from twofold.instance import NO_LOAD, InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff, HandoffPolicy
from twofold.scheduling.cluster.shared import LoadReport, SharedCluster
from twofold.scheduling.instance.sequence import KvReservation
from twofold.scheduling.routers.cells import CellLoad, CellPools, CellRouter, CellSelector
from twofold.scheduling.routers.draws import drawn
from twofold.simulation.kernel import EventOrder, Kernel

# Instances report at different times: multiples of the golden ratio spread any number of phases evenly.
_PHASE_STEP = 0.6180339887498949
_HANDOFF = FixedHandoff(HandoffMode.LAYER_WISE)  # placeholder: `ReplicatedControllers` chooses the hand-off mode


class _Dispatcher(Router):
    """Router that passes each request to a pseudo-randomly chosen controller."""

    def __init__(self, controllers: list[SharedCluster], cells: CellRouter | None) -> None:
        self._controllers, self._cells = controllers, cells

    def new_pools(self) -> Pools:
        return Pools() if self._cells is None else self._cells.new_pools()

    def controller_of(self, request: Request) -> SharedCluster:
        return self._controllers[drawn(request) % len(self._controllers)]

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        placed = self.controller_of(request).place(request, now)
        if placed is None or self._cells is None:
            return None if placed is None else placed.route
        assert isinstance(pools, CellPools)  # noqa: S101  (created by new_pools)
        return self._cells.route_in(placed.route.prefill, request, tokens, pools, now)


class ReplicatedControllers(ClusterScheduler):
    """Simulated cluster scheduler with several controllers, each with its own router.

    Delayed load reports inform a controller about the requests placed by other controllers.
    """

    def __init__(
        self,
        kernel: Kernel,
        spec: ControlSpec,
        router: Callable[[], Router],
        handoffs: HandoffPolicy,
        memory: KvReservation,
    ) -> None:
        # With a router over cells, controllers choose a cell from the reports. Instances in the cell are chosen by
        # their current loads.
        made = router()
        cells = made if isinstance(made, CellRouter) else None
        self.controllers = [
            SharedCluster(CellSelector() if cells else router(), _HANDOFF, memory, spec.own_load)
            for _ in range(spec.controllers)
        ]
        self._dispatcher = _Dispatcher(self.controllers, cells)
        super().__init__(self._dispatcher, handoffs, memory)
        self._kernel = kernel
        self._every, self._delay = ps(spec.reports_every_s), ps(spec.report_delay_s)
        self._phases: dict[str, int] = {}  # time of first report, by instance or cell
        self._due: set[str] = set()  # reports scheduled
        self._under_way: dict[str, tuple[SharedCluster, InstanceLoad, InstanceLoad]] = {}

    # -- instances --------------------------------------------------------------------------------------------------

    def add_instance(self, instance_id: str, role: Role, capacity_tokens: int | None = None, cell: str = "") -> None:
        super().add_instance(instance_id, role, capacity_tokens, cell)
        pools = self.pools
        if not isinstance(pools, CellPools):
            for controller in self.controllers:
                controller.add_instance(instance_id, role, capacity_tokens, cell)
        else:
            self._show(pools.cells[cell].load)

    def remove_instance(self, instance_id: str) -> list[str]:
        load = self.pools.get(instance_id)
        held = super().remove_instance(instance_id)
        pools = self.pools
        if not isinstance(pools, CellPools):
            for controller in self.controllers:
                controller.remove_instance(instance_id)
        elif load is not None:
            self._show(pools.cells[load.cell].load)
        return held

    def _show(self, cell: CellLoad) -> None:
        for controller in self.controllers:
            pools = controller.pools
            known = pools.get(cell.id)
            if known is None:
                known = CellLoad(cell.id)
                pools.add(known)
            assert isinstance(known, CellLoad)  # noqa: S101  (controllers of cells know only cells)
            known.prefilling, known.decoding = cell.prefilling, cell.decoding
            if cell.place:  # can prefill and decode
                pools.resume(known)
            else:
                pools.pause(known)

    # -- requests ---------------------------------------------------------------------------------------------------

    def place(self, request: Request, now: float) -> PlacedRequest | None:
        controller = self._dispatcher.controller_of(request)
        placed = super().place(request, now)
        if placed is None:
            controller.withdraw(request.id)
            return None
        prefill = self._unit(placed.route.prefill)
        decode = self._unit(placed.route.decode)
        self._under_way[request.id] = controller, prefill, decode
        self._changed(prefill, decode)
        return placed

    def first_token(self, request_id: str, now: float) -> None:
        super().first_token(request_id, now)
        if request_id in self._under_way:
            controller, prefill, _ = self._under_way[request_id]
            controller.first_token(request_id, now)
            self._changed(prefill, prefill)

    def handed_off(self, request_id: str, started: float, now: float) -> None:
        super().handed_off(request_id, started, now)
        if request_id in self._under_way:
            controller, prefill, _ = self._under_way[request_id]
            controller.handed_off(request_id, started, now)
            self._changed(prefill, prefill)

    def withdraw(self, request_id: str) -> None:
        super().withdraw(request_id)
        if request_id in self._under_way:
            controller, prefill, decode = self._under_way.pop(request_id)
            controller.withdraw(request_id)
            self._changed(prefill, decode)

    # -- reports ----------------------------------------------------------------------------------------------------

    def _unit(self, instance_id: str) -> InstanceLoad:
        load = self.pools.get(instance_id)
        assert load is not None  # noqa: S101  (a request was just placed on it)
        return self.pools.cells[load.cell].load if isinstance(self.pools, CellPools) else load

    def _changed(self, first: InstanceLoad, second: InstanceLoad) -> None:
        self._report_soon(first)
        if second is not first:
            self._report_soon(second)

    def _report_soon(self, unit: InstanceLoad) -> None:
        name, every, now = unit.id, self._every, self._kernel.now
        if not every:
            self._report(unit)
        elif name not in self._due:
            self._due.add(name)
            phase = self._phases.get(name)
            if phase is None:
                phase = self._phases[name] = int(every * (len(self._phases) * _PHASE_STEP % 1.0))
            self._kernel.schedule(now + (phase - now) % every, EventOrder.REPORT, self._report, unit)

    def _report(self, unit: InstanceLoad) -> None:
        self._due.discard(unit.id)
        total = unit.less(NO_LOAD)
        reports = [LoadReport(unit.id, total, controller.own(unit.id)) for controller in self.controllers]
        if self._delay:
            self._kernel.schedule(self._kernel.now + self._delay, EventOrder.REPORT, self._deliver, reports)
        else:
            self._deliver(reports)

    def _deliver(self, reports: list[LoadReport]) -> None:
        for controller, report in zip(self.controllers, reports, strict=True):
            controller.reported(report)
