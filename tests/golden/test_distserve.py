"""Latencies of every request, and the SLO attainment, equal the results of DistServe's simulator."""

import json
import re

import pytest
from bench.distserve.golden import distserve_sim

from twofold.bench.real_data import data_folder
from twofold.cluster.spec import PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.request import Request
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.timeline import Moment

CATALOG = load_catalog()
NAME = re.compile(r"golden-(distserve|vllm)-(.+)-(\d)(\d)(\d)(\d)-r[\d.]+-N\d+\.json")


def files():
    return sorted((data_folder() / "golden" / "distserve").glob("golden-*.json"))


def pool(role, tensor, stages):
    return PoolSpec(
        machines=int(stages),
        machine="dgx-a100",
        role=role,
        tensor_parallel=int(tensor),
        pipeline_parallel=int(stages),
        instances=1,
    )


def cluster(name):
    engine, model, *degrees = NAME.fullmatch(name).groups()
    if engine == "vllm":
        return distserve_sim([pool(Role.MIXED, *degrees[:2])], model, engine=engine)
    return distserve_sim([pool(Role.PREFILL, *degrees[:2]), pool(Role.DECODE, *degrees[2:])], model)


class Ended(Observer):
    """Observer that stores the TTFT and TPOT of each request."""

    def __init__(self):
        self.latencies = {}

    def ended(self, timeline, now):
        arrived, first, last = (
            timeline.moments[moment] * 1e3 for moment in (Moment.ARRIVED, Moment.FIRST_TOKEN, Moment.LAST_TOKEN)
        )
        # As in DistServe, TPOT is (last − first token) / n.
        self.latencies[timeline.request.id] = first - arrived, (last - first) / timeline.output_tokens


def play(spec, rows, slo=None):
    """Simulate requests; return the TTFT and TPOT of each request in ms, and the simulation result."""
    requests = [
        Request(id=str(number), arrival_s=at / 1e3, prompt_tokens=prompt, output_tokens=output)
        for number, (at, prompt, output) in enumerate(rows)
    ]
    ended = Ended()
    result = simulate(spec, requests, catalog=CATALOG, observers=[ended], slo=slo)
    return [ended.latencies[request.id] for request in requests], result


@pytest.mark.skipif(not files(), reason="needs the reference output of DistServe's simulator: set TWOFOLD_DATA")
@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_latencies_equal_distserve(path):
    """TTFT and TPOT differ from DistServe's by at most 0.01%, and SLO attainment by at most half a percentage point."""
    rows = json.loads(path.read_text())
    sizes = [(row["arrival_ms"], row["prompt_len"], row["output_len"]) for row in rows]
    ours, _ = play(cluster(path.name), sizes)
    theirs = [(row["ttft_ms"], row["tpot_ms"]) for row in rows]
    for (ttft_ms, tpot_ms), (their_ttft_ms, their_tpot_ms) in zip(ours, theirs, strict=True):
        assert ttft_ms == pytest.approx(their_ttft_ms, rel=1e-4)
        assert tpot_ms == pytest.approx(their_tpot_ms, rel=1e-4)
    for scale in (0.5, 0.75, 1.0, 1.5, 2.0):
        bounds = Slo(ttft_s=0.2 * scale, tpot_s=0.1 * scale)
        _, result = play(cluster(path.name), sizes, bounds)
        kept = sum(ttft <= 200 * scale and tpot <= 100 * scale for ttft, tpot in theirs)
        assert result.slo_met / len(rows) == pytest.approx(kept / len(rows), abs=0.005)
