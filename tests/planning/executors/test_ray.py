"""The executor that runs planning simulations on a Ray cluster."""

import importlib.util

import pytest

from twofold.errors import ConfigurationError
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.executors.ray import RayExecutor
from twofold.planning.trials import simulate_trial

has_ray = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_names_the_missing_extra(make_problem):
    with pytest.raises(ConfigurationError, match=r"twofold\[ray\]"):
        RayExecutor(make_problem(), "auto")


@pytest.mark.skipif(not has_ray, reason="needs Ray")
@pytest.mark.filterwarnings("ignore")
def test_a_local_cluster_returns_the_results_of_a_local_simulation(make_problem):
    problem = make_problem()
    one = Trial(Design(family=Family(kinds=(problem.kind("h100"),) * 2), counts=(2, 2)), 4.0)
    with RayExecutor(problem, "local") as executor:
        assert executor.submit(one).result(120).evaluation == simulate_trial(problem, one).evaluation
