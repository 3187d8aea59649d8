"""Queries of the Grafana dashboard match the metrics of the service."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.ledgers import ledger
from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.messages import HandoffReport, StoreStatus, StoreTier
from twofold.serving.telemetry.snapshot import InstanceState
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.slo import Slo

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy/grafana/twofold.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
OTHERS = {"job", "le"}  # labels that Prometheus and histograms add


def exported_labels():
    """Return the label names of each Prometheus metric that the service exports."""
    telemetry = Telemetry("tiny", slo=Slo(ttft_s=1.0))
    telemetry.ended(request_timeline([4.0, 6.0, 7.0], **SPLIT_MOMENTS), 7.0)
    for role in (Role.PREFILL, Role.DECODE):
        telemetry.instances.role("p", role)
    telemetry.instances.state("p", InstanceState.UP)
    telemetry.instances.status("p", InstanceStatus(0, 0, 0, 0, 0, 1, 1, 0, swap_blocks_total=1, blocks_evicted=1))
    telemetry.instances.prefilled("p", 9, 4)
    telemetry.instances.restarted("p")
    telemetry.handoff(HandoffReport(instance="p", request_id="r", started_s=1.0, ended_s=2.0, bytes_moved=7))
    telemetry.count_rejection(Request(id="r", arrival_s=0.0, prompt_tokens=1, output_tokens=1), "queue-full")
    tier = StoreTier(capacity=9, blocks=5, hits=3, removals={"capacity": 1})
    telemetry.stores.status(StoreStatus(host="h", epoch=1, tiers={"memory": tier}, bytes_moved={"loaded": 7}))
    telemetry.overload(ledger("p0", "d0"))
    telemetry.predicted(1.0, 2.0)
    families = text_string_to_metric_families(telemetry.exposition().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_queries_use_existing_metrics_and_labels(expression):
    exported = exported_labels()
    names = re.findall(r"twofold:\w+", expression)
    assert names
    labels = set(re.findall(r"(\w+)=~?\"", expression))
    for group in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", expression):
        labels |= {label.strip() for label in group.split(",")}
    assert set(names) <= set(exported)
    assert labels - OTHERS <= set().union(*(exported[name] for name in names))


def test_dashboard_shows_every_metric():
    shown = set(re.findall(r"twofold:(\w+?)(?:_bucket|_sum|_count)?\{", " ".join(EXPRESSIONS)))
    everything = {
        re.sub(r"_(bucket|sum|count|created)$", "", name).removeprefix("twofold:") for name in exported_labels()
    }
    created = {name.removesuffix("_total") for name in everything if name.endswith("_total")}
    assert everything - created <= shown


def test_panels_have_unique_ids_descriptions_and_places():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"] for panel in PANELS)
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
