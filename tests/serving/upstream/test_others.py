"""Routing considers load on a server from clients other than the gateway."""

from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import ROUTERS
from twofold.serving.upstream.metrics import ExternalLoads, PrefillTotals, ServerMetrics

READINGS = {"blocks": 100, "block_tokens": 10, "mean_prompt": 50.0, "prefills": PrefillTotals()}


def readings(steps, running=0, waiting=0, used=0.0):
    return ServerMetrics(steps=steps, running=running, waiting=waiting, used=used, **READINGS)


def cluster(router="jsq"):
    made = ClusterScheduler(ROUTERS[router](), FixedHandoff(HandoffMode.PULL))
    for name in ("one", "two"):
        made.add_instance(name, Role.MIXED, 1000)
    return made


def accounts(load):
    return load.pending_prefill_tokens, load.prefills, load.decodes, load.requests, load.reserved_tokens


def request(number):
    return Request(id=f"r{number}", arrival_s=0.0, prompt_tokens=20, output_tokens=5)


def test_external_load_diverts_requests():
    busy = cluster()
    others = ExternalLoads(busy.pools)
    for step in range(3):
        others.update("one", readings(step, running=2, waiting=1, used=0.3))
    assert accounts(busy.pools.get("one")) == (50, 1, 2, 3, 300)
    assert [busy.place(request(number), 0.0).route.prefill for number in range(2)] == ["two", "two"]


def test_own_requests_are_not_external_load():
    ours = cluster()
    others = ExternalLoads(ours.pools)
    for number in range(4):
        ours.place(request(number), 0.0)
    before = accounts(ours.pools.get("one"))
    for step in range(3):
        others.update("one", readings(step, running=2, used=0.004))
    assert accounts(ours.pools.get("one")) == before


def test_a_stalled_engine_has_no_load():
    """A server whose engine runs no iterations has a load of zero, even if its metrics count running requests."""
    idle = cluster()
    others = ExternalLoads(idle.pools)
    for _ in range(3):
        # The metrics may still count requests aborted since the last step.
        others.update("one", readings(7, running=2, used=0.3))
    assert accounts(idle.pools.get("one")) == (0, 0, 0, 0, 0)


def test_one_reading_does_not_count():
    """Load that appears in only one reading of the metrics is ignored."""
    quick = cluster()
    others = ExternalLoads(quick.pools)
    for step, running in enumerate((0, 3, 0, 3, 0)):
        # A single reading may count requests of the gateway that have just ended.
        others.update("one", readings(step, running=running))
        assert accounts(quick.pools.get("one")) == (0, 0, 0, 0, 0)


def test_a_lost_server_has_no_external_load():
    lost = cluster()
    others = ExternalLoads(lost.pools)
    for step in range(3):
        others.update("one", readings(step, running=2, waiting=2))
    others.forget("one")
    assert accounts(lost.pools.get("one")) == (0, 0, 0, 0, 0)
