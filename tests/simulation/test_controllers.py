"""Simulated clusters with several controllers and delayed load reports."""

import msgspec
import pytest

from twofold.cluster.spec import CONTROL_ROUTERS, ClusterSpec, ControlSpec, InstanceFailure, PoolSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.cluster.shared import OwnLoad
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.workload.source import workload

CATALOG = load_catalog()
SPLIT = ClusterSpec(
    pools=(
        PoolSpec(machines=4, machine="dgx-h100", role=Role.PREFILL),
        PoolSpec(machines=6, machine="dgx-h100", role=Role.DECODE),
    ),
    model="bloom-176b",
    router="jsq",
)
SLO = Slo(ttft_s=1.0, tpot_s=0.1)


class Ended(Observer):
    def __init__(self):
        self.timelines = []

    def ended(self, timeline, now):
        self.timelines.append(timeline)


def requests(count=800):
    return workload("azure-conv", rate=24, num_requests=count)


def run(control=msgspec.UNSET, requested=None, **change):
    spec = msgspec.structs.replace(SPLIT, control=control, **change)
    return simulate(spec, requested or requests(), catalog=CATALOG, slo=SLO, series=False)


def routed(control=msgspec.UNSET, requested=None, **change):
    """Run a simulation; return the instances and event times of each request, by id."""
    ended = Ended()
    spec = msgspec.structs.replace(SPLIT, control=control, **change)
    simulate(spec, requested or requests(), catalog=CATALOG, observers=[ended])
    return {each.request.id: (each.prefill_instance, each.decode_instance, each.moments) for each in ended.timelines}


@pytest.mark.parametrize(
    "control",
    [
        ControlSpec(reports_every_s=1.0, report_delay_s=0.5),
        ControlSpec(reports_every_s=0.0),
        ControlSpec(reports_every_s=0.0, own_load=OwnLoad.SENT),
        ControlSpec(reports_every_s=0.0, own_load=OwnLoad.IGNORED),
        ControlSpec(reports_every_s=0.0, controllers=5),
    ],
)
def test_current_reports_give_the_decisions_of_one_controller(control):
    assert routed(control) == routed()


def test_late_reports_cause_herding():
    """Late load reports cause herding (crowded instances), which `two-choices` routing reduces."""
    late = ControlSpec(reports_every_s=1.0, own_load=OwnLoad.IGNORED)
    known, herding = run(), run(late)
    assert herding.ttft_s.percentile(50) > 2.5 * known.ttft_s.percentile(50)
    assert herding.slo_met < known.slo_met / 2
    counting = run(msgspec.structs.replace(late, own_load=OwnLoad.SENT))
    assert counting.slo_met > 0.9 * known.slo_met
    drawing = run(late, router="two-choices")
    assert drawing.slo_met > 1.5 * herding.slo_met


def test_delay_and_interval_have_similar_effects():
    at_once = ControlSpec(reports_every_s=0.0, report_delay_s=1.0, own_load=OwnLoad.IGNORED)
    assert run(at_once).slo_met < run().slo_met / 2


def test_more_controllers_raise_latency():
    every = ControlSpec(reports_every_s=5.0)
    assert run(msgspec.structs.replace(every, controllers=8)).slo_met < run(every).slo_met


def test_cells_tolerate_late_reports():
    blind = ControlSpec(reports_every_s=5.0, controllers=8)
    assert run(blind, router="cells:jsq", cells=2).slo_met > run(blind).slo_met


@pytest.mark.parametrize("router", CONTROL_ROUTERS)
def test_every_request_ends_and_runs_are_repeatable(router):
    control = ControlSpec(controllers=3, reports_every_s=0.3, report_delay_s=0.1)
    results = [run(control, requests(200), router=router) for _ in range(2)]
    assert results[0].completed == 200
    assert results[0].ttft_s == results[1].ttft_s


@pytest.mark.parametrize("cells", [2, 4])
def test_cells_divide_the_instances_of_each_role(cells):
    """Each cell (group of instances) runs both phases of its requests."""

    def cell(instance):
        role, _, number = instance.partition("-")
        return int(number) * cells // (4 if role == "prefill" else 6)

    for control in (msgspec.UNSET, ControlSpec(controllers=2)):
        used = routed(control, router="cells:jsq", cells=cells).values()
        assert {cell(prefill) for prefill, _, _ in used} == set(range(cells))
        assert all(cell(prefill) == cell(decode) for prefill, decode, _ in used)


@pytest.mark.parametrize("router", ["jsq", "cells:jsq"])
def test_failed_instances_get_no_requests(router):
    control = ControlSpec(controllers=3, reports_every_s=1.0)
    failures = (InstanceFailure(instance="prefill-0", at_s=2.0, back_s=4.0),)
    used = routed(control, router=router, failures=failures)
    arrivals = {request.id: request.arrival_s for request in requests()}
    away = {name for name, at in arrivals.items() if 2.0 < at < 4.0}
    later = {name for name, at in arrivals.items() if at > 5.0}
    assert not any(used[name][0] == "prefill-0" for name in away)
    assert any(used[name][0] == "prefill-0" for name in later)


def test_rejects_requests_larger_than_every_instance():
    huge = Request(id="huge", arrival_s=0.0, prompt_tokens=10**9, output_tokens=2)
    result = run(ControlSpec(controllers=2), [huge, *requests(50)])
    assert (result.rejected, result.completed) == (1, 50)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"control": ControlSpec(), "router": "splitwise"}, "the router splitwise cannot use load reports"),
        ({"control": ControlSpec(), "router": "conductor"}, "the router conductor cannot use load reports"),
        ({"cells": 2}, "cells need one of the routers cells:jsq, not jsq"),
        ({"cells": 5, "router": "cells:jsq"}, "cells must be from 1 to 4, the number of prefill instances, not 5"),
        ({"cells": 0, "router": "cells:jsq"}, "cells must be from 1 to 4"),
    ],
)
def test_rejects_invalid_control_settings(change, says):
    with pytest.raises(ConfigurationError, match=says):
        run(**change)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"controllers": 0}, "controllers must be from 1 to 10000, not 0"),
        ({"reports_every_s": -1.0}, "reports_every_s must be seconds from 0"),
        ({"report_delay_s": float("nan")}, "report_delay_s must be seconds from 0"),
    ],
)
def test_rejects_values_out_of_range(given, says):
    with pytest.raises(ConfigurationError, match=says):
        ControlSpec(**given)


def test_default_control_is_not_serialized():
    assert not {"control", "cells"} & set(msgspec.to_builtins(SPLIT))
