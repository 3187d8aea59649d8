"""Report of KV capacity plans."""

from itertools import pairwise

import pytest

from support.traces import ask
from twofold.hardware.catalog import load_catalog
from twofold.performance.registry import performance_model
from twofold.planning.capacity.plan import CapacityQuery, capacity_plan
from twofold.reporting.plan.capacity import CapacityReport, added_by, capacities, capacity_text


@pytest.fixture(scope="module")
def plan():
    catalog = load_catalog()
    model, machine = catalog.model("llama2-70b"), catalog.machine("h100")
    query = CapacityQuery(
        model=model,
        machine=machine,
        performance=performance_model("auto", model, machine, 8),
        accelerators=8,
        dram=catalog.tier("dram"),
        disk=catalog.tier("nvme"),
        nodes=2,
    )
    requests = [ask(n, float(n), 20 * 512, prefix_blocks=range(100 * (n % 5), 100 * (n % 5) + 20)) for n in range(60)]
    return capacity_plan(requests, query)


def test_rows_end_where_more_is_of_no_use(plan):
    """The list of cache capacities ends at the first capacity with the maximum hit rate."""
    for tier in plan.tiers:
        rows = capacities(tier)
        assert rows[0] == 0.0
        assert rows[-1] >= max(tier.local.full_gb_per_node, tier.pool.full_gb_per_node) > rows[-2]


def test_marginal_gains_add_up(plan):
    curve = plan.tiers[0].pool
    points = [curve.at(gb) for gb in capacities(plan.tiers[0])]
    total = sum(
        added_by(plan, before, point).accelerator_s_per_gb_h * (point.gb_per_node - before.gb_per_node) * plan.nodes
        for before, point in pairwise(points)
    )
    assert total == pytest.approx(points[-1].accelerators * 3600)


def test_returns_exceed_one_up_to_the_best_capacity(plan):
    curve = plan.tiers[0].pool
    rows = capacities(plan.tiers[0])
    best = curve.best().gb_per_node
    points = [curve.at(gb) for gb in rows]
    beyond = [added_by(plan, before, point).returns for before, point in pairwise(points) if before.gb_per_node >= best]
    assert all(returns < 1 for returns in beyond)


def test_json_report_has_all_tiers_and_the_text(plan):
    report = CapacityReport.of(plan)
    assert report.text == capacity_text(plan)
    assert report.prefill_error is not None
    best = report.tiers[0].pool.best
    assert f"{best.hit_rate:.1%}" in report.text
    assert f"NVMe alone pays up to {report.disk_alone.pool.best.gb_per_node:,.0f} GB per node" in report.text
    assert report.json() == CapacityReport.of(plan).json()
