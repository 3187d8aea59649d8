"""A Ray cluster on this machine whose nodes can be killed, small enough for two CPU cores."""

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

from ray._private import services
from ray.cluster_utils import Cluster

from support.waiting import until

SMALL = {"object_store_memory": 80 * 2**20}
# Longer timeouts for a busy machine with two cores.
PATIENT = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_gcs_server_port_wait_time_s": "300",
}


class RayNodes:
    """The nodes of a Ray cluster; `address` is that of the head node, which is never killed."""

    def __init__(self, head_cpus, **labels):
        arguments = {"num_cpus": head_cpus, "include_dashboard": False, "labels": labels or None, **SMALL}
        self._patience = ExitStack()
        self._patience.enter_context(mock.patch.dict(os.environ, PATIENT))
        self._patience.enter_context(mock.patch.object(services, "get_node", patient(services.get_node)))
        self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self._nodes = {}
        self.address, self.head = self._cluster.address, self._cluster.head_node.node_id

    def add(self, cpus, **labels):
        """Add a node and return its id."""
        node = self._cluster.add_node(wait=False, num_cpus=cpus, labels=labels or None, **SMALL)
        self._nodes[node.node_id] = node
        return node.node_id

    def raylet(self, node):
        return self._nodes[node].all_processes["raylet"][0].process

    def kill(self, node):
        """Kill a node and reap its process."""
        process = self.raylet(node)
        process.kill()
        process.wait()  # the node's workers treat a zombie as a running process

    def close(self):
        self._cluster.shutdown()
        self._patience.close()


def patient(get_node):
    """Wrap Ray's `get_node` so that it waits longer for a node."""

    def found(*arguments):
        try:
            return get_node(*arguments)
        except RuntimeError:
            return None

    # Ray's timeout of 30 s is too short on a busy machine.
    return lambda *arguments: until(lambda: found(*arguments), tries=3000)


@contextmanager
def ray_nodes(head_cpus, **labels):
    nodes = RayNodes(head_cpus, **labels)
    try:
        yield nodes
    finally:
        nodes.close()
