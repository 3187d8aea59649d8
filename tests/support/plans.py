"""Functions that build cluster plans for tests from fixed evaluation results, without simulation."""

import sqlite3
from contextlib import closing

import msgspec

from support.analytic_cluster import COLOCATED, SPLIT, design
from support.simulated import FITTED, pool
from twofold.cluster.file import load_cluster
from twofold.planning.deployment import Deployment
from twofold.planning.design import Budget
from twofold.planning.evaluation import Evaluation, LatencyPercentiles
from twofold.planning.plan import DesignChoice, Plan, PlanQuery
from twofold.planning.search import Objective
from twofold.simulation.result import Check


def stored_evaluations(path):
    """Return the number of simulation results in a store."""
    with closing(sqlite3.connect(path)) as database:
        (count,) = database.execute("SELECT count(*) FROM evaluations").fetchone()
    return count


def evaluation(rate, error=FITTED, ttft_s=0.5):
    return Evaluation(
        met=True,
        checks=(
            Check(name="requests within the SLO", value=0.95, bound=0.9, met=True, at_least=True),
            Check(name="TTFT P90", value=ttft_s, bound=1.0, met=True),
        ),
        requests=round(120 * rate),
        output_tokens=1000,
        duration_s=120.0,
        energy_j=120.0 * 5000.0,
        ttft_s=LatencyPercentiles(p50=0.1, p90=ttft_s, p99=0.9),
        tpot_s=LatencyPercentiles(p50=0.03, p90=0.05, p99=0.06),
        e2e_s=LatencyPercentiles(p50=3.0, p90=9.0, p99=20.0),
        pools=(pool("prefill", 1, error), pool("decode", 1, error)),
    )


def choice(one, rate, highest_rate=None, **more):
    return DesignChoice(design=one, rate=rate, highest_rate=highest_rate or rate, evaluation=evaluation(rate, **more))


def plan(
    *choices,
    objective=Objective.THROUGHPUT,
    rate=None,
    break_even=None,
    without=(),
    no_room=(),
    families=(SPLIT, COLOCATED),
):
    groups = tuple((family,) for family in families)
    question = PlanQuery(objective=objective, groups=groups, budget=Budget(machines=10), rate=rate)
    return Plan(query=question, choices=choices, without=without, no_room=no_room, break_even=break_even)


def split_and_colocated(split_rate=20.0, colocated_rate=10.0, **more):
    """Return a plan of two designs: disaggregated for `split_rate` requests/s, colocated for `colocated_rate`."""
    both = [choice(design(5, 5), split_rate), choice(design(10, family=COLOCATED), colocated_rate)]
    return plan(*sorted(both, key=lambda each: -each.highest_rate), **more)


def read_deployment(path):
    """Return the contents of a deployment file. Its cluster must be valid as a cluster file."""
    found = msgspec.yaml.decode(path.read_bytes(), type=Deployment, strict=False)
    return msgspec.structs.replace(found, cluster=load_cluster(path))
