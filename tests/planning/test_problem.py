"""Cluster specs of planned designs, and parsing of design names such as `h100+a100`."""

import msgspec
import pytest

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.planning.design import Design, Family
from twofold.planning.problem import COLOCATED_ROUTER, parse_families, with_parallelism


def families(problem, *names, machines=None, split=True, colocated=True):
    return parse_families(problem, names, machines, split=split, colocated=colocated)


def test_a_split_design_is_two_pools(make_problem):
    """The first machine type of a design becomes the prefill pool; the second becomes the decode pool."""
    problem = make_problem()
    (family,) = families(problem, "h100+a100", colocated=False)
    spec = problem.spec(Design(family=family, counts=(3, 2)))
    assert [(pool.machines, pool.machine, pool.role) for pool in spec.pools] == [
        (3, "dgx-h100", Role.PREFILL),
        (2, "dgx-a100", Role.DECODE),
    ]
    assert spec.router == "splitwise"


def test_a_colocated_design_keeps_requests_where_they_are(make_problem):
    """A colocated design becomes a cluster spec with one mixed pool."""
    problem = make_problem()
    small = Family(kinds=(problem.kind("h100"),), batcher="chunked-prefill", max_num_batched_tokens=512)
    spec = problem.spec(Design(family=small, counts=(4,)))
    assert (spec.router, spec.max_num_batched_tokens) == (COLOCATED_ROUTER, 512)
    assert (spec.pools[0].role, spec.pools[0].batcher) == (Role.MIXED, "chunked-prefill")


def test_the_four_families_of_splitwise_are_looked_at_by_default(make_problem):
    """The default designs are Splitwise's four split designs, and three colocated designs per machine type."""
    names = [family.group for family in families(make_problem())]
    assert names[:4] == ["a100+a100", "h100+h100", "h100+a100", "h100+h100-pcap"]
    assert len(names) == 4 + 3 * 3


def test_families_are_named_or_all_pairs(make_problem):
    """A design family is named by its machines (h100+a100) or by Splitwise's letters (HA)."""
    problem = make_problem()
    named = families(problem, "HA,splitwise-hh", "h100+a100", colocated=False)
    assert [family.group for family in named] == ["h100+a100", "h100+h100"]
    pairs = families(problem, machines="a100,h100", colocated=False)
    assert [family.group for family in pairs] == ["a100+a100", "a100+h100", "h100+a100", "h100+h100"]
    assert not any(family.split for family in families(problem, split=False))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": ("h100",)}, "PREFILL"),
        ({"names": ("h100+b400",)}, "b400"),
        ({"names": ("HH",), "machines": "h100"}, "not both"),
        ({"names": (), "split": False, "colocated": False}, "exclude all designs"),
    ],
)
def test_rejects_invalid_families(make_problem, arguments, words):
    names = arguments.pop("names")
    with pytest.raises(ConfigurationError, match=words):
        families(make_problem(), *names, **arguments)


def test_machines_that_do_not_hold_the_model_are_left_out(make_problem):
    giant = make_problem(model="deepseek-v3")
    groups, reasons = with_parallelism(giant, families(giant, machines="h100,b200"))
    assert {kind.name for group in groups for family in group for kind in family.kinds} == {"dgx-b200"}
    assert len(reasons) == 1
    assert "8x h100-80gb" in reasons[0]
    with pytest.raises(ConfigurationError, match="deepseek-v3 needs"):
        with_parallelism(giant, families(giant, machines="a100"))


def parallelism(problem, machine):
    return [(kind.instances, kind.tensor_parallel, kind.pipeline_parallel) for kind in problem.layouts(machine)]


def test_every_parallelism_that_divides_a_machine_is_searched(make_problem):
    assert parallelism(make_problem(model="llama-3.1-8b"), "h100") == [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1)]
    asked = msgspec.structs.replace(make_problem(model="llama-3.1-8b"), tensor_parallel=2)
    assert parallelism(asked, "h100") == [(4, 2, 1)]


def test_split_designs_are_searched_with_chunks_unless_a_batcher_is_given(make_problem):
    problem = make_problem()
    pair = families(problem, "h100+a100", colocated=False)
    ((default, chunked),), _ = with_parallelism(problem, pair)
    assert (default.batcher, chunked.batcher) == (None, "chunked-prefill")
    spec = problem.spec(chunked.smallest)
    assert [pool.batcher for pool in spec.pools] == ["chunked-prefill"] * 2
    given = msgspec.structs.replace(problem, batchers={Role.PREFILL: "prefill-balanced"})
    ((only,),), _ = with_parallelism(given, pair)
    assert [pool.batcher for pool in given.spec(only.smallest).pools] == ["prefill-balanced", None]
    assert msgspec.structs.replace(problem, batchers={Role.MIXED: "mixed"}).split_batchers == problem.split_batchers
    saturating = msgspec.structs.replace(problem.template, max_num_batched_tokens="auto")
    assert msgspec.structs.replace(problem, template=saturating).split_batchers == (None,)
    template = msgspec.structs.replace(problem.template, rules="splitwise-sim")
    published = msgspec.structs.replace(problem, template=template)
    assert published.split_batchers == (None,)


def test_only_measured_parallelism_is_searched_if_some_was_measured(make_problem):
    assert parallelism(make_problem(), "h100") == [(1, 8, 1)]


def test_experts_are_also_spread_over_the_machine(make_problem):
    """Their instances are the ranks of attention data parallelism, which hold an eighth of the experts each."""
    pytest.importorskip("aiconfigurator_core", reason="needs the extra aiconfigurator")
    found = make_problem(model="deepseek-v3")
    problem = msgspec.structs.replace(
        found, template=msgspec.structs.replace(found.template, performance="aiconfigurator")
    )
    names = [kind.short for kind in problem.layouts("h200")]
    assert names == ["h200@8×TP1-EP8", "h200@4×TP2-EP8", "h200@2×TP4-EP8", "h200@TP8-EP8", "h200@TP8"]


def test_a_model_larger_than_a_machine_is_a_pipeline_over_several(make_problem):
    problem = make_problem(model="llama-3.1-405b")
    (kind,) = problem.layouts("a100")
    assert (kind.tensor_parallel, kind.pipeline_parallel, kind.machines, kind.accelerators) == (8, 2, 2, 16)
    assert kind.price_per_h == 2 * problem.kind("a100").price_per_h
    (pool,) = problem.spec(Design(family=Family(kinds=(kind,), batcher="mixed"), counts=(3,))).pools
    assert (pool.machines, pool.tensor_parallel, pool.pipeline_parallel) == (6, 8, 2)


def test_rejects_numbers_out_of_range(make_problem):
    with pytest.raises(ConfigurationError, match="--attainment must be more than 0"):
        msgspec.structs.replace(make_problem(), attainment=90.0).require_sensible()
    with pytest.raises(ConfigurationError, match="--duration must be more than 0"):
        make_problem(duration_s=0.0).require_sensible()
