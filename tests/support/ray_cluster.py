"""A Ray cluster of several nodes on this machine, small enough for two cores; a node may be killed."""

from contextlib import contextmanager

from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80 * 2**20}


class RayNodes:
    """`address` is that of the head, whose node is never killed; others are known by their ids."""

    def __init__(self, head_cpus, **labels):
        arguments = {"num_cpus": head_cpus, "include_dashboard": False, "labels": labels or None, **SMALL}
        self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self._nodes = {}
        self.address, self.head = self._cluster.address, self._cluster.head_node.node_id

    def add(self, cpus, **labels):
        """The id of a new node."""
        node = self._cluster.add_node(num_cpus=cpus, labels=labels or None, **SMALL)
        self._nodes[node.node_id] = node
        return node.node_id

    def raylet(self, node):
        """The process of a node's raylet."""
        return self._nodes[node].all_processes["raylet"][0].process

    def kill(self, node):
        """Its raylet ends by SIGKILL, and is reaped: while it is a zombie its workers take it for alive."""
        process = self.raylet(node)
        process.kill()
        process.wait()

    def close(self):
        self._cluster.shutdown()


@contextmanager
def ray_nodes(head_cpus, **labels):
    nodes = RayNodes(head_cpus, **labels)
    try:
        yield nodes
    finally:
        nodes.close()
