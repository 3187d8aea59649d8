"""Names, prices and power of designs."""

from support.analytic_cluster import COLOCATED, FAST, SPLIT, design
from twofold.planning.design import Family


def test_a_design_adds_up_its_machines():
    one = design(2, 3)
    assert (one.machines, one.price_per_h, one.tdp_w) == (5, 2 * 38 + 3 * 17.6, 2 * 10_200 + 3 * 6_500)


def test_names_have_kinds_and_counts():
    assert design(2, 3).name == "2+3 fast+slow"
    assert design(4, family=COLOCATED).name == "4 fast mixed"
    small = Family(kinds=(FAST,), batcher="chunked-prefill", max_num_batched_tokens=512)
    assert small.name == "fast chunked-prefill@512"
    assert SPLIT.split
    assert not small.split
