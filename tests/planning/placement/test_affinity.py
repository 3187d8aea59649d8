"""Links decide whether prefill and decode may be on different nodes."""

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
def test_hand_offs_stay_within_nodes_only_where_the_way_out_is_too_slow(between, within, affinity):
    """And not where the way within is no better."""
    links = NodeLinks(kv=5e9, between_nodes=between, within_node=within)
    assert links.affinity is affinity
    assert "GB/s" in links.reason


def test_links_follow_from_model_and_machine(make_problem):
    """A DGX's own network carries the KV of a 13B model; 25 Gbit/s, the paper's, does not."""
    problem = make_problem(model="opt-13b", router="jsq")
    kinds = [problem.instance("a100", degree) for degree in (1, 2, 4)]
    assert links_of(problem, kinds).affinity is Affinity.HIGH
    slow = replace(problem, template=replace(problem.template, link_bytes_per_s=25e9 / 8))
    assert links_of(slow, kinds).affinity is Affinity.LOW


def test_stages_that_correspond_share_a_node():
    """Nodes of four: two stages of TP2 beside two of TP2; not beside one stage, and not beside TP4."""
    assert shares_nodes(design(kind(2, 2), kind(2, 2), 1, 1), 4)
    assert not shares_nodes(design(kind(2, 2), kind(2, 1), 1, 1), 4)
    assert not shares_nodes(design(kind(4, 2), kind(2, 2), 1, 1), 4)


def test_what_fits_one_node_shares_it():
    """Whatever its stages are."""
    assert shares_nodes(design(kind(2, 1), kind(1, 2), 1, 1), 4)
    assert not shares_nodes(design(kind(2, 1), kind(1, 2), 2, 1), 4)
