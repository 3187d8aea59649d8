"""A Ray cluster gives the same results; where there is none, a sentence says so."""

import importlib.util

import pytest

from twofold.errors import ConfigurationError
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.executors.ray import RayExecutor
from twofold.planning.trials import simulate_trial

has_ray = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_without_ray_the_extra_is_named(make_problem):
    """One sentence, with what to install."""
    with pytest.raises(ConfigurationError, match=r"twofold\[ray\]"):
        RayExecutor(make_problem(), "auto")


@pytest.mark.skipif(not has_ray, reason="needs Ray")
@pytest.mark.filterwarnings("ignore")
def test_results_are_those_of_this_process(make_problem):
    """A cluster of this machine only."""
    problem = make_problem()
    one = Trial(Design(family=Family(kinds=(problem.kind("h100"),) * 2), counts=(2, 2)), 4.0)
    with RayExecutor(problem, "local") as executor:
        assert executor.submit(one).result(120).evaluation == simulate_trial(problem, one).evaluation
