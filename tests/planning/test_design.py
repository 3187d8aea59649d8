"""Names, prices and power of designs."""

from msgspec.structs import replace

from support.analytic_cluster import COLOCATED, FAST, SPLIT, design
from twofold.planning.design import Family


def test_a_design_adds_up_its_machines():
    one = design(2, 3)
    assert (one.machines, one.price_per_h, one.tdp_w) == (5, 2 * 38 + 3 * 17.6, 2 * 10_200 + 3 * 6_500)


def test_names_have_kinds_and_counts():
    assert design(2, 3).name == "2×fast prefill + 3×slow decode"
    assert design(4, family=COLOCATED).name == "4×fast mixed"
    small = Family(kinds=(FAST,), batcher="chunked-prefill", max_num_batched_tokens=512)
    assert small.group == "fast chunked-prefill@512"
    assert SPLIT.group == "fast+slow"
    policies = replace(SPLIT, router="jsq", batcher="chunked-prefill")
    assert policies.smallest.name == "1×fast prefill + 1×slow decode, jsq, chunked-prefill"
    assert SPLIT.split
    assert not small.split


def test_names_have_the_parallelism():
    quarter = replace(FAST, accelerators=8, tensor_parallel=2)
    assert design(3, family=Family(kinds=(quarter,), batcher="mixed")).name == "3×fast@4×TP2 mixed"
    long = replace(FAST, accelerators=16, tensor_parallel=8, pipeline_parallel=2, machines=2)
    one = design(3, 2, family=Family(kinds=(quarter, long)))
    assert one.name == "3×fast@4×TP2 prefill + 2×fast@TP8×PP2 decode"
    assert one.machines == 3 + 2 * 2
