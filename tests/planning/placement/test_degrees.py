"""Tensor and pipeline parallelism (TP, PP) of candidate instances."""

import pytest
from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.planning.placement.instances import instances_of


def published(make_problem, model):
    problem = make_problem("ttft=0.2,tpot=0.1", "jsq", model=model)
    return replace(problem, template=replace(problem.template, performance="distserve-published"))


def degrees(kinds):
    return [(kind.tensor_parallel, kind.pipeline_parallel) for kind in kinds]


def test_lists_degrees_that_fit_and_were_measured(make_problem):
    kinds = instances_of(published(make_problem, "opt-13b"), "a100", 4)
    # The pipeline degree must divide the 40 layers of OPT-13B.
    assert degrees(kinds) == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    assert [kind.accelerators for kind in kinds] == [1, 2, 2, 4, 4, 4]
    whole = published(make_problem, "opt-13b").kind("a100")
    assert kinds[0].price_per_h == pytest.approx(whole.price_per_h / 8)


def test_omits_degrees_that_do_not_hold_the_model(make_problem):
    kinds = instances_of(published(make_problem, "opt-66b"), "a100", 4)
    # OPT-66B needs 131 GB for weights, more than a single A100 has.
    assert (1, 1) not in degrees(kinds)
    assert (2, 1) in degrees(kinds)
    with pytest.raises(ConfigurationError, match="opt-66b needs"):
        instances_of(published(make_problem, "opt-66b"), "a100", 1)
