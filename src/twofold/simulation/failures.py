"""Instances that die in a simulation, and come back."""

from collections.abc import Sequence

from twofold.errors import ConfigurationError
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.kernel import Order, ps
from twofold.simulation.spec import Failure


def plan_failures(cluster: VirtualCluster, failures: Sequence[Failure]) -> None:
    """Schedule them; raises ConfigurationError for an instance or a time that cannot be."""
    for failure in failures:
        instance = cluster.instances.get(failure.instance)
        if instance is None:
            names = list(cluster.instances)
            known = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
            raise ConfigurationError(
                f"there is no instance {failure.instance!r} that could fail: there are {known}"
            )
        if failure.at_s < 0 or (failure.back_s is not None and failure.back_s <= failure.at_s):
            raise ConfigurationError(
                f"a failure of {failure.instance} at {failure.at_s:g} s must not be before 0 nor after its return"
            )
        order = Order.FAILURE + instance.number
        cluster.kernel.schedule(ps(failure.at_s), order, cluster.take_down, instance)
        if failure.back_s is not None:
            cluster.kernel.schedule(ps(failure.back_s), order, cluster.bring_back, instance)
