"""A service on a Ray cluster of three nodes, some of which are killed under load."""

import pytest

from support.ray_service import answers_of, processes_of, ray_service, under_load
from support.waiting import until
from twofold.cli import pools as pools_run

pytest.importorskip("ray")

from support.ray_cluster import ray_nodes

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def answers(tiny_model_dir):
    return answers_of(tiny_model_dir("llama"))


@pytest.fixture(scope="module")
def cluster():
    """Yield a Ray cluster with room for two workers on the head node and for one on each of two more nodes."""
    with ray_nodes(2) as nodes:
        for _ in range(2):
            nodes.add(1)
        yield nodes


@pytest.fixture(scope="module")
def service(cluster, tiny_model_dir, tmp_path_factory):
    flags = ("--prefill", "1", "--decode", "2", "--max-restart-delay", "1")
    with ray_service(tiny_model_dir("llama"), cluster.address, tmp_path_factory.mktemp("ray"), *flags) as running:
        until(lambda: len(running.up()) == 3)
        yield running


def test_workers_of_a_phase_are_spread_over_nodes(service, cluster):
    nodes = service.nodes()
    assert nodes["decode-0"] != nodes["decode-1"]
    assert len(set(nodes.values())) == 3


@pytest.mark.covers(engine="torch", feature="ray")
def test_workers_of_a_lost_node_move_to_the_others(service, cluster, answers):
    lost = next(node for node in service.nodes().values() if node != cluster.head)
    (worker,) = [name for name, node in service.nodes().items() if node == lost]
    before = processes_of(worker)
    assert len(before) == 1

    def kill():
        cluster.kill(lost)
        until(lambda: service.nodes()[worker] != lost and len(service.up()) == 3)

    under_load(service, answers, kill)
    assert not any(process.is_running() for process in before)
    assert service.nodes()[worker] == cluster.head


def test_the_plan_shrinks_without_room_and_is_restored(service, cluster, answers):
    """The service shrinks to 1P+1D when a node is lost, and grows again when a node is added."""
    (lost,) = set(service.nodes().values()) - {cluster.head}

    def kill():
        cluster.kill(lost)
        until(lambda: "continuing with 1P+1D" in " ".join(service.output.split()))
        until(lambda: service.roles_up() == ["decode", "prefill"])

    def add():
        cluster.add(1)
        until(lambda: len(service.up()) == 3)

    under_load(service, answers, kill)
    under_load(service, answers, add)
    assert "all workers have room" in pools_run.ask(service.url, None).replans[-1]
    assert {role for role, _ in service.states().values()} == {"prefill", "decode"}


def test_no_actor_or_process_is_left(service, cluster):
    """All workers end when the service process is killed."""
    # Runs last, because the tests of this file share the service.
    family = [one for name in service.up() for one in processes_of(name)]
    assert len(family) == 3
    service.process.kill()
    service.process.wait()
    until(lambda: not any(one.is_running() and one.status() != "zombie" for one in family))
