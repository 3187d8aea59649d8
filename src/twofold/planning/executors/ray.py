"""Planning on a Ray cluster: an executor simulates designs, and a function counts the cluster's machines."""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future

import msgspec

from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Machine
from twofold.planning.evaluation import SimulatedTrial, Trial
from twofold.planning.evaluator import Executor
from twofold.planning.problem import Problem
from twofold.planning.trials import try_trial
from twofold.raycluster.cluster import RayNode, connect

_MAKERS = ("nvidia-", "tesla-", "amd-", "instinct-")


class RayInventory(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of machines and accelerators in a Ray cluster, by machine type."""

    machines: dict[str, int]
    accelerators: dict[str, int]
    left_out: tuple[str, ...]  # explanations of ignored nodes


def ray_inventory(nodes: Iterable[RayNode], catalog: Catalog) -> RayInventory:
    """Count the machines and accelerators of a Ray cluster by machine type in the catalog."""
    machines, accelerators, left_out = Counter[str](), Counter[str](), []
    for node in nodes:
        if not node.accelerators:
            continue
        machine = _machine_of(node, catalog)
        if machine is None:
            kind = node.accelerator or "an unknown type"
            left_out.append(f"{node.address} has {node.accelerators} x {kind}, which is not in the catalog")
            continue
        accelerators[machine.name] += node.accelerators
        whole = node.accelerators // machine.count
        if whole:
            machines[machine.name] += whole
    return RayInventory(machines=dict(machines), accelerators=dict(accelerators), left_out=tuple(left_out))


def _machine_of(node: RayNode, catalog: Catalog) -> Machine | None:
    """Return the catalog's machine type that matches a Ray node; None if there is none."""
    if node.accelerator is None:
        return None
    # The accelerator must match; the number of accelerators decides between several machines.
    fits = [
        machine
        for machine in catalog.machines.values()
        if machine.power_cap == 1.0 and _is(node.accelerator, machine.accelerator.name)
    ]
    return min(fits, key=lambda machine: machine.count != node.accelerators, default=None)


def _is(ray_type: str, name: str) -> bool:
    """Return whether a Ray accelerator type, such as A100-80G, matches the catalog accelerator `name`."""
    word = ray_type.lower().removesuffix("-oam")
    for maker in _MAKERS:
        word = word.removeprefix(maker)
    return name in {word, f"{word}b"} or name.startswith(f"{word}-")


class RayExecutor(Executor):
    """Executor that simulates designs on a Ray cluster. Raises ConfigurationError if there is no Ray or no cluster."""

    def __init__(self, problem: Problem, address: str) -> None:
        ray = self._ray = connect(address, "--ray")
        self._problem = ray.put(problem)
        self._task = ray.remote(num_cpus=1)(try_trial)  # the cluster needs the same version of Twofold

    def submit(self, trial: Trial) -> Future[SimulatedTrial | str]:
        future: Future[SimulatedTrial | str] = self._task.remote(self._problem, trial).future()
        return future

    def __exit__(self, *_exception: object) -> None:
        self._ray.shutdown()
