"""The machines of a Ray cluster, as what a plan may use.

Trials on a Ray cluster: the same simulations, so the same results, on more machines.
"""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Self

import msgspec

from twofold.errors import ConfigurationError, UserError
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Machine
from twofold.planning.evaluation import SimulatedTrial, Trial
from twofold.planning.problem import Problem
from twofold.planning.trials import simulate_trial
from twofold.raycluster.cluster import RayNode, connect

_MAKERS = ("nvidia-", "tesla-", "amd-", "instinct-")


class RayInventory(msgspec.Struct, frozen=True, kw_only=True):
    """Whole machines of the catalog and their accelerators, by machine; `left_out` says which nodes are not in it."""

    machines: dict[str, int]
    accelerators: dict[str, int]
    left_out: tuple[str, ...]


def ray_inventory(nodes: Iterable[RayNode], catalog: Catalog) -> RayInventory:
    """What the nodes with accelerators are in the catalog; nodes without are for other things."""
    machines, accelerators, left_out = Counter[str](), Counter[str](), []
    for node in nodes:
        if not node.accelerators:
            continue
        machine = _machine_of(node, catalog)
        if machine is None:
            kind = node.accelerator or "a type that Ray does not know"
            left_out.append(f"{node.address} has {node.accelerators} x {kind}, which is not in the catalog")
            continue
        accelerators[machine.name] += node.accelerators
        whole = node.accelerators // machine.count
        if whole:
            machines[machine.name] += whole
    return RayInventory(machines=dict(machines), accelerators=dict(accelerators), left_out=tuple(left_out))


def _machine_of(node: RayNode, catalog: Catalog) -> Machine | None:
    """Of several with the accelerator the one that has as many of them as the node; none that is capped, which Ray
    cannot know."""
    if node.accelerator is None:
        return None
    fits = [
        machine
        for machine in catalog.machines.values()
        if machine.power_cap == 1.0 and _is(node.accelerator, machine.accelerator.name)
    ]
    return min(fits, key=lambda machine: machine.count != node.accelerators, default=None)


def _is(ray_type: str, name: str) -> bool:
    """Whether Ray's word, as in H100, A100-80G or AMD-Instinct-MI300X-OAM, means an accelerator, as in h100-80gb."""
    word = ray_type.lower().removesuffix("-oam")
    for maker in _MAKERS:
        word = word.removeprefix(maker)
    return name in {word, f"{word}b"} or name.startswith(f"{word}-")


class RayExecutor:
    """Tasks of one core each on the cluster at `address`, which must have the same Twofold installed.

    Raises ConfigurationError where Ray is not installed or there is no cluster.
    """

    def __init__(self, problem: Problem, address: str) -> None:
        ray = self._ray = connect(address, "--ray")
        self._problem = ray.put(problem)
        self._task = ray.remote(num_cpus=1)(_run)

    def submit(self, trial: Trial) -> Future[SimulatedTrial]:
        outer: Future[SimulatedTrial] = Future()
        inner: Future[SimulatedTrial | str] = self._task.remote(self._problem, trial).future()
        inner.add_done_callback(lambda done: _pass_on(done, outer))
        return outer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ray.shutdown()


def _run(problem: Problem, trial: Trial) -> SimulatedTrial | str:
    """An evaluation, or the sentence of a user's mistake."""
    try:
        return simulate_trial(problem, trial)
    except UserError as error:
        return str(error)


def _pass_on(inner: "Future[SimulatedTrial | str]", outer: Future[SimulatedTrial]) -> None:
    if inner.cancelled() or not outer.set_running_or_notify_cancel():
        outer.cancel()
        return
    error = inner.exception()
    told = None if error is not None else inner.result()
    if isinstance(told, SimulatedTrial):
        outer.set_result(told)
    elif error is not None:
        outer.set_exception(error)
    else:
        outer.set_exception(ConfigurationError(str(told)))
