"""Live re-planning of the numbers of prefill and decode workers."""

import asyncio
import json
import urllib.request
from math import exp
from random import Random

import msgspec
import pytest

from support.routed import cluster
from support.toy import CATALOG
from twofold.bench.client import ClientConfig
from twofold.bench.endpoint import discover
from twofold.bench.load import LoadConfig, run_load
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import metrics, served
from twofold.cluster.file import parse_cluster
from twofold.errors import RequestError, SearchError
from twofold.events import Recorder
from twofold.instance import Role
from twofold.request import FinishReason, Request
from twofold.scheduling.replan.replanner import ReplanOutcome, RoleSplit, SearchResult, SplitForecast
from twofold.scheduling.replan.traffic import TrafficSample
from twofold.serving.config import ReplanConfig
from twofold.serving.controller import replanning
from twofold.serving.controller.replanning import LiveReplanning, SearchJob, search
from twofold.slo import Slo
from twofold.timeline import Timeline

SPEC = msgspec.structs.replace(
    parse_cluster("3xh100:prefill,1xh100:decode", model="llama2-70b", catalog=CATALOG), router="jsq-planned"
)
CONFIG = ReplanConfig(cluster=SPEC, slo=Slo(ttft_s=1.0, tpot_s=0.05))


class Service:
    """Service stub that records role changes."""

    def __init__(self, stuck=()):
        self.roles, self.decisions, self.stuck = [], [], stuck
        self.gone, self.started = [], []

    def set_role(self, instance, role):
        if instance in self.stuck:
            raise RequestError(f"{instance} is stuck", status=409)
        self.roles.append((instance, role))

    def retire(self, instance):
        self.gone.append(instance)

    def unretire(self, instance, role):
        self.started.append((instance, role))

    def retired(self):
        return ["spare-0"]

    def replanned(self, decision):
        self.decisions.append(decision)


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(replanning.time, "monotonic", lambda: self.now)


def findings(job, split=RoleSplit(1, 3)):  # noqa: B008  (a split never changes)
    forecasts = SplitForecast(job.running, 0.4), SplitForecast(split, 0.97)
    return SearchResult(running=forecasts[0], best=forecasts[1], searched=forecasts, requests=900, cpu_s=1.0)


async def step(live, clock, *, before_s=300.0, after_s=60.0):
    """Feed synthetic requests to the re-planner `live`. The request rate rises after `before_s` seconds."""
    draw, number = Random(0), 0
    while clock.now < before_s + after_s:
        clock.now += draw.expovariate(10.0 if clock.now < before_s else 25.0)
        request = Request(id=str(number), arrival_s=clock.now, prompt_tokens=500, output_tokens=4096)
        live.arrived(request, clock.now)
        timeline = Timeline(request)
        if number % 10 == 9:
            live.rejected(timeline, "queue-full", clock.now)
        else:
            timeline.output_tokens = round(100 * exp(draw.gauss(0, 1)))
            timeline.finish_reason = FinishReason.STOP if number % 10 else FinishReason.ABORT
            live.ended(timeline, clock.now)
        number += 1
        await asyncio.sleep(0)


def planned(monkeypatch, run_search, stuck=()):
    """Return a service stub and a `LiveReplanning` that has seen the request rate increase."""
    service, clock = Service(stuck), Clock(monkeypatch)
    pools = cluster([Role.PREFILL] * 3 + [Role.DECODE], "jsq-planned").pools
    live = LiveReplanning(CONFIG, pools, service, Recorder(), run_search)
    asyncio.run(step(live, clock))
    return service, live


def test_a_traffic_shift_starts_a_search_and_changes_roles(monkeypatch):
    asked = []

    async def run_search(job):
        asked.append(job)
        return findings(job)

    service, live = planned(monkeypatch, run_search)
    (job,) = asked
    assert (job.running, job.stock) == (RoleSplit(3, 1), 5)
    assert job.traffic.rate == pytest.approx(25.0, rel=0.25)
    assert service.roles == [("prefill-0", Role.DECODE), ("prefill-1", Role.DECODE)]
    assert [decision.outcome for decision in service.decisions] == [ReplanOutcome.MOVE]
    (said,) = live.messages(service.decisions[0].at_s + 12.0)
    assert said.startswith("12 s ago: ")


@pytest.mark.parametrize(
    ("split", "gone", "started"),
    [(RoleSplit(1, 1), ["prefill-0", "prefill-1"], []), (RoleSplit(3, 2), [], [("spare-0", Role.DECODE)])],
)
def test_replicas_are_retired_and_started(monkeypatch, split, gone, started):

    async def run_search(job):
        return findings(job, split)

    service, _ = planned(monkeypatch, run_search)
    assert (service.roles, service.gone, service.started) == ([], gone, started)


def test_a_worker_that_cannot_change_role_is_skipped(monkeypatch):

    async def run_search(job):
        return findings(job)

    service, _ = planned(monkeypatch, run_search, stuck=("prefill-0",))
    assert service.roles == [("prefill-1", Role.DECODE)]


def test_a_failed_search_is_logged_as_a_decision(monkeypatch):

    async def run_search(job):
        raise SearchError("the search was ended after 60 s")

    service, live = planned(monkeypatch, run_search)
    assert service.roles == []
    assert [decision.outcome for decision in service.decisions] == [ReplanOutcome.FAILED]
    assert "the search was ended after 60 s" in live.messages(0.0)[0]


def test_closing_cancels_the_search(monkeypatch):
    ended = []

    async def run_search(job):
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(True)

    async def run():
        service, clock = Service(), Clock(monkeypatch)
        pools = cluster([Role.PREFILL] * 3 + [Role.DECODE], "jsq-planned").pools
        live = LiveReplanning(CONFIG, pools, service, Recorder(), run_search)
        await step(live, clock)
        live.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == [True]


OUTPUTS = TrafficSample(rate=14.0, burstiness=1.0, prompt_tokens=(400,), output_tokens=(200,))


def test_the_search_process_returns_the_planners_findings():
    found = asyncio.run(search(SearchJob(config=CONFIG, traffic=OUTPUTS, running=RoleSplit(3, 1), stock=4)))
    assert found.best.split == RoleSplit(1, 3)
    assert found.running.split == RoleSplit(3, 1)


def test_a_search_is_killed_at_its_time_limit():
    hasty = msgspec.structs.replace(CONFIG, search_limit_s=0.05)
    job = SearchJob(config=hasty, traffic=OUTPUTS, running=RoleSplit(3, 1), stock=4)
    with pytest.raises(SearchError, match=r"ended after 0\.05 s"):
        asyncio.run(search(job))


def test_a_failed_search_reports_its_error():
    wrong = msgspec.structs.replace(CONFIG, cluster=msgspec.structs.replace(SPEC, router="jsq"))
    job = SearchJob(config=wrong, traffic=OUTPUTS, running=RoleSplit(3, 1), stock=4)
    with pytest.raises(SearchError, match="never moves an instance"):
        asyncio.run(search(job))


CLUSTER = """
model: llama2-70b
router: jsq-planned
pools:
  - {machines: 3, machine: dgx-h100, role: prefill}
  - {machines: 1, machine: dgx-h100, role: decode}
"""


def traffic(begin_s, seconds, output, seed, rate=25.0):
    """Yield requests at a mean rate of `rate` per second."""
    draw, now = Random(seed), begin_s
    while (now := now + draw.expovariate(rate)) < begin_s + seconds:
        tokens = round(output * draw.uniform(0.5, 1.5))
        yield Request(id=f"{seed}-{now}", arrival_s=now, prompt_tokens=100, output_tokens=tokens)


async def load(url, requests):
    endpoint = await discover(url)
    lowest, vocabulary = token_range(endpoint.vocab_size)
    maker = PromptMaker(lowest=lowest, vocabulary=vocabulary)
    return await run_load(LoadConfig(endpoint=endpoint, prompts=maker, client=ClientConfig(ignore_eos=True)), requests)


def send(url, requests):
    """Send the requests and check that every stream is complete."""
    sent = list(requests)
    result = asyncio.run(load(url, sent))
    assert result.errors == {}
    tokens = {timeline.request.id: timeline.output_tokens for timeline in result.timelines}
    assert tokens == {request.id: request.output_tokens for request in sent}


def send_until(url, said, outputs):
    """Send requests to the service at `url` until the text of a re-planning decision contains `said`."""
    for seed in range(100, 108):
        if any(said in decision for decision in pools_of(url)["replans"]):
            return
        send(url, traffic(0.0, 15.0, outputs, seed))


def pools_of(url):
    with urllib.request.urlopen(f"{url}/pools", timeout=600) as response:  # noqa: S310  (our own http URL)
        return json.load(response)


def test_role_moves_break_no_stream(tmp_path):
    """When outputs become 15 times as long, prefill workers become decode workers while streams continue."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    flags = ["--engine", "emulated", "--cluster", str(path), "--replan", "--slo", "ttft=2,tpot=0.045"]
    with served(None, flags) as url:
        send(url, [*traffic(0.0, 14.0, 4, seed=0), *traffic(14.0, 36.0, 60, seed=1)])
        send_until(url, "becomes decode", 60)
        told, counted = pools_of(url), metrics(url)
    assert any(f'replans_total{{outcome="{ReplanOutcome.MOVE}"}} 1.0' in line for line in counted.splitlines()), told
    assert [member["role"] for member in told["pools"]].count("decode") > 1
    assert "becomes decode" in told["replans"][0]


def test_scaling_down_and_up_breaks_no_stream(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace("machines: 3", "machines: 2").replace("machines: 1", "machines: 2"))
    flags = ["--engine", "emulated", "--cluster", str(path), "--slo", "ttft=2,tpot=0.045"]
    with served(None, [*flags, "--replan", "--retire", "--min-between", "5"]) as url:
        lull = traffic(14.0, 46.0, 20, seed=1, rate=5.0)
        send(url, [*traffic(0.0, 14.0, 20, seed=0), *lull, *traffic(60.0, 30.0, 60, seed=2)])
        send_until(url, "starts as", 60)
        told = pools_of(url)
    assert "retires" in told["replans"][0]
    assert any("starts as" in said for said in told["replans"][1:]), told
