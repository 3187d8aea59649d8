"""Work that others have given a server counts where routers look."""

from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.cluster.handoff_policy import FixedHandoff
from twofold.scheduling.cluster.scheduler import ClusterScheduler
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


def test_the_work_of_others_sends_ours_elsewhere():
    """Two readings in a row say that the first server is busy for somebody else."""
    busy = cluster()
    others = ExternalLoads(busy.pools)
    for step in range(3):
        others.read("one", readings(step, running=2, waiting=1, used=0.3))
    assert accounts(busy.pools.get("one")) == (50, 1, 2, 3, 300)
    assert [busy.arrive(request(number), 0.0).route.prefill for number in range(2)] == ["two", "two"]


def test_what_is_ours_is_counted_once():
    """Requests that we placed are in the readings as well."""
    ours = cluster()
    others = ExternalLoads(ours.pools)
    for number in range(4):
        ours.arrive(request(number), 0.0)
    before = accounts(ours.pools.get("one"))
    for step in range(3):
        others.read("one", readings(step, running=2, used=0.004))
    assert accounts(ours.pools.get("one")) == before


def test_an_engine_that_stands_has_nothing_to_do():
    """It said last that something runs, and that has been aborted since."""
    idle = cluster()
    others = ExternalLoads(idle.pools)
    for _ in range(3):
        others.read("one", readings(7, running=2, used=0.3))
    assert accounts(idle.pools.get("one")) == (0, 0, 0, 0, 0)


def test_one_reading_alone_says_nothing():
    """A request of ours may just have ended here and not yet there."""
    quick = cluster()
    others = ExternalLoads(quick.pools)
    for step, running in enumerate((0, 3, 0, 3, 0)):
        others.read("one", readings(step, running=running))
        assert accounts(quick.pools.get("one")) == (0, 0, 0, 0, 0)


def test_what_is_gone_is_forgotten():
    """A server that is lost loses the requests of others too."""
    lost = cluster()
    others = ExternalLoads(lost.pools)
    for step in range(3):
        others.read("one", readings(step, running=2, waiting=2))
    others.forget("one")
    assert accounts(lost.pools.get("one")) == (0, 0, 0, 0, 0)
