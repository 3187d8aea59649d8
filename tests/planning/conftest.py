"""Fixtures of small planning problems."""

import pytest

from twofold.cluster.spec import ClusterSpec
from twofold.hardware.catalog import load_catalog
from twofold.planning.problem import Problem
from twofold.planning.workload import WorkloadArguments
from twofold.slo import parse_slo


@pytest.fixture(scope="session")
def catalog():
    return load_catalog()


@pytest.fixture(scope="session")
def make_problem(catalog):
    """Return a function that makes a small planning problem from an SLO, a router, a workload and a model."""

    def problem(slo="ttft=2,tpot=0.1", router="splitwise", workload="azure-conv", model="bloom-176b", **more):
        arguments = {"duration_s": 10.0, "min_requests": 50} | more
        return Problem(
            template=ClusterSpec(pools=(), model=model, performance="auto", router=router),
            workload=WorkloadArguments(workload=workload, **arguments),
            slo=parse_slo(slo),
            catalog=catalog,
        )

    return problem
