"""Conversion of a Ray cluster's nodes to machines of the catalog."""

import pytest

from twofold.hardware.catalog import load_catalog
from twofold.planning.executors.ray import ray_inventory
from twofold.raycluster.cluster import RayNode


def node(gpus, kind=None, address="10.0.0.1"):
    total = {"CPU": 96.0, "memory": 1e12} | ({"GPU": float(gpus)} if gpus else {})
    return RayNode(id="n", address=address, total=total | ({} if kind is None else {f"accelerator_type:{kind}": 1.0}))


@pytest.mark.parametrize(
    ("kind", "machine"),
    [
        ("H100", "dgx-h100"),
        ("A100", "dgx-a100"),
        ("A100-80G", "dgx-a100"),
        ("H200", "dgx-h200"),
        ("B200", "dgx-b200"),
        ("L40S", "l40s-8"),
        ("AMD-Instinct-MI300X-OAM", "mi300x-8"),
    ],
)
def test_types_as_ray_writes_them(kind, machine):
    """Ray's accelerator types are mapped to machines of the catalog."""
    assert ray_inventory([node(8, kind)], load_catalog([])).machines == {machine: 1}


def test_whole_machines_and_accelerators_are_counted():
    stock = ray_inventory([node(8, "H100"), node(8, "H100"), node(4, "H100"), node(0)], load_catalog([]))
    assert (stock.machines, stock.accelerators, stock.left_out) == ({"dgx-h100": 2}, {"dgx-h100": 20}, ())


@pytest.mark.parametrize("kind", ["A100-40G", "H20", "V100", None])
def test_reports_nodes_that_are_not_in_the_catalog(kind):
    stock = ray_inventory([node(8, kind, "10.0.0.7")], load_catalog([]))
    assert not stock.accelerators
    assert "10.0.0.7 has 8 x" in stock.left_out[0]
