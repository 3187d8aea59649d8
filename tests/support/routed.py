"""Idle clusters, instance loads and expected routes for tests of routers."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import ANY

from support.predicted import forecast
from twofold.events import Route
from twofold.handoff import HandoffMode
from twofold.instance import NO_LOAD, InstanceLoad, LoadTotals, Role
from twofold.request import Request
from twofold.route import PrefixFetch
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import FORECASTING_ROUTERS, ROUTERS

_ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}


def request(name: str = "a", prompt: int = 100, output: int = 10, blocks: tuple[int, ...] = ()) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output, prefix_blocks=blocks)


def cluster(roles: list[Role], router: str = "jsq", capacity_tokens: int | None = None) -> ClusterScheduler:
    """Return a cluster scheduler with one idle instance per entry of `roles`, named `<role>-<number>`."""
    made = ClusterScheduler(ROUTERS[router](), FixedHandoff(HandoffMode.LAYER_WISE))
    names = [f"{role.value}-{i}" for i, role in enumerate(roles)]
    if router in FORECASTING_ROUTERS:
        made.pools.forecast = forecast(*names)
    for name, role in zip(names, roles, strict=True):
        made.add_instance(name, role, capacity_tokens)
    return made


def load(name: str, capacity: int | None = None, queued: int = 0, **numbers: int) -> InstanceLoad:
    """Return the load of an instance with the given counts of tokens and requests. The first letter of
    `name` selects the role, such as `p` for prefill.
    """
    made = InstanceLoad(name, _ROLES[name[0]], capacity)
    made.queued = partial(int, queued)
    made.replace(NO_LOAD, LoadTotals(**numbers))
    return made


def numbers(load: InstanceLoad | LoadTotals) -> SimpleNamespace:
    """Return the token and request counts of an instance load, for comparison with `==`."""
    names = ("pending_prefill_tokens", "reserved_tokens", "prefills", "decodes", "requests")
    return SimpleNamespace(**{name: getattr(load, name) for name in names})


def predicted(prefill: str, decode: str, reused_tokens: int = 0, fetch: PrefixFetch | None = None) -> Route:
    """Return the expected route of a request, with `unittest.mock.ANY` as the predicted TTFT."""
    return Route(prefill, decode, (), reused_tokens, fetch, ANY)


def pools(*loads: InstanceLoad) -> Pools:
    made = Pools()
    for each in loads:
        made.add(each)
    return made
