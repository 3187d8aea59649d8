"""DistServe's node affinity of a cluster: low if KV transfers between nodes are too slow."""

import pytest
from msgspec.structs import replace

from support.analytic_placement import kind
from twofold.planning.design import Design, Family
from twofold.planning.placement.instances import Affinity, NodeLinks, links_of, shares_nodes


def design(prefill, decode, *counts):
    return Design(family=Family(kinds=(prefill, decode)), counts=counts)


@pytest.mark.parametrize(
    ("between", "within", "affinity"),
    [(50e9, 300e9, Affinity.HIGH), (1e9, 300e9, Affinity.LOW), (1e9, 1e9, Affinity.HIGH)],
)
def test_affinity_is_low_only_for_slow_networks(between, within, affinity):
    links = NodeLinks(kv=5e9, between_nodes=between, within_node=within)
    assert links.affinity is affinity
    assert "GB/s" in links.reason


def test_links_follow_from_model_and_machine(make_problem):
    """The network of a DGX A100 is fast enough for KV transfers of OPT-13B between nodes; 25 Gbit/s is too slow."""
    problem = make_problem(model="opt-13b", router="jsq")
    kinds = [problem.instance("a100", degree) for degree in (1, 2, 4)]
    assert links_of(problem, kinds).affinity is Affinity.HIGH
    slow = replace(problem, template=replace(problem.template, link_bytes_per_s=25e9 / 8))
    assert links_of(slow, kinds).affinity is Affinity.LOW


def test_matching_stages_share_a_node():
    assert shares_nodes(design(kind(2, 2), kind(2, 2), 1, 1), 4)
    assert not shares_nodes(design(kind(2, 2), kind(2, 1), 1, 1), 4)
    assert not shares_nodes(design(kind(4, 2), kind(2, 2), 1, 1), 4)


def test_designs_that_fit_one_node_share_it():
    assert shares_nodes(design(kind(2, 1), kind(1, 2), 1, 1), 4)
    assert not shares_nodes(design(kind(2, 1), kind(1, 2), 2, 1), 4)
