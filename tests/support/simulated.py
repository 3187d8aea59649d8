"""Helpers that build simulation results with fixed values for tests."""

import math

from twofold.cluster.spec import ClusterSpec, InstanceFailure, PoolSpec
from twofold.instance import Role
from twofold.performance.cost import ModelAccuracy
from twofold.simulation.histogram import Histogram
from twofold.simulation.observers.base import IterationRun
from twofold.simulation.result import PoolResult, SimulationResult
from twofold.simulation.series import Series
from twofold.simulation.statistics import Tally

FITTED = ModelAccuracy(prefill=0.1, decode=0.02, basis="fitted to 19 measured points")
ESTIMATED = ModelAccuracy(prefill=0.25, decode=0.2, basis="roofline", estimated=True)
_NS = 1e-9
_PS = 10**12


def histogram(*seconds):
    return _counted(seconds, _NS)


def spread(middle, count=100):
    """Return a histogram of `count` values, evenly spaced on a log scale from `middle` / 10 to `middle` * 10."""
    return histogram(*(middle * 10 ** (2 * index / (count - 1) - 1) for index in range(count)))


def multiples(*values):
    return _counted(values, 1e-6)


def _counted(values, unit):
    tally = Tally()
    for value in values:
        tally.add(round(value / unit))
    return Histogram.of(tally, unit)


def series(*values, every_s=1.0):
    made = Series()
    for index, value in enumerate(values):
        made.set(round(index * every_s * _PS), value)
    made.finish(round(len(values) * every_s * _PS))
    return made


def waves(middle, count=300):
    return series(*(middle * (1 + math.sin(index / 20)) for index in range(count)))


def pool(role, machines, error=FITTED, machine="dgx-h100"):
    return PoolResult(
        role=role,
        machine=machine,
        machines=machines,
        instances=machines,
        utilization=0.5,
        energy_j=3.6e6,
        mean_batch=12.5,
        performance="fitted bloom-176b on dgx-h100 TP8",
        error=error,
    )


def cluster(**more):
    pools = (
        PoolSpec(machines=2, machine="dgx-h100", role=Role.PREFILL),
        PoolSpec(machines=1, machine="dgx-h100", role=Role.DECODE),
    )
    failures = (InstanceFailure(instance="decode-0", at_s=30.0, back_s=60.0),)
    return ClusterSpec(pools=pools, model="bloom-176b", failures=failures, **more)


def result(**changed):
    roles = ("prefill", "decode")
    named = {f"{kind}/{role}": waves(3.0) for kind in ("queue", "batch") for role in roles}
    named |= {"pool/prefill": series(2.0, 1.0), "pool/decode": series(1.0, 1.0)}
    named |= {"pool/mixed": series(0.0, 1.0), "power_w": waves(8000.0)}
    values = {
        "spec": cluster(),
        "arrived": 100,
        "completed": 98,
        "rejected": 1,
        "failed": 1,
        "unfinished": 0,
        "prompt_tokens": 100_000,
        "output_tokens": 20_000,
        "duration_s": 300.0,
        "arrival_s": 250.0,
        "ttft_s": spread(0.3),
        "tpot_s": spread(0.04),
        "itl_s": spread(0.04),
        "e2e_s": spread(8.0),
        "queue_s": spread(0.1),
        "transfer_s": spread(0.005),
        "visible_transfer_s": spread(0.001),
        "ttft_slowdown": multiples(*(1 + index / 100 for index in range(101))),
        "tpot_slowdown": multiples(*(1 + index / 1000 for index in range(101))),
        "e2e_slowdown": multiples(*(1 + index / 1000 for index in range(101))),
        "slo_met": 90,
        "preemptions": 3,
        "handoffs": 98,
        "pools": (pool("prefill", 2), pool("decode", 1)),
        "series": named,
        "energy_j": 7.2e6,
        "price_per_h": 114.0,
        "tdp_w": 30_600.0,
        "events": 5_000,
        "iterations": 40_000,
        "cpu_s": 1.5,
    }
    return SimulationResult(**(values | changed))


def run(instance="prefill-0", start_s=0.0, end_s=1.0, prompts=1, decodes=0):
    return IterationRun(
        instance=instance,
        start_ps=round(start_s * _PS),
        end_ps=round(end_s * _PS),
        iterations=1,
        prefill_tokens=100 * prompts,
        prefill_sequences=prompts,
        decode_sequences=decodes,
        context_tokens=1000 * decodes,
        watts=5600.4,
    )
